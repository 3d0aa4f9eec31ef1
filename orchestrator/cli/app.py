"""The command line: every command under its heading, in the order of `--help`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
import typer.completion
import typer.core

from orchestrator import __version__
from orchestrator.cli import files, fleet, results, runs, shapes, tune
from orchestrator.cli.options import flat


class _WithHelp:
    def get_help_option(self, ctx: Any) -> Any:
        """Return --help with a default: typer loads pydantic to learn that an option without one is not given."""
        option = super().get_help_option(ctx)  # type: ignore[misc]
        option.default = False
        return option


class Command(_WithHelp, typer.core.TyperCommand):
    """A command whose options are listed under the headings that they name (`rich_help_panel`), in plain text."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, then options without a heading, then each heading's."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                default = "Arguments" if param.param_type_name == "argument" else "Options"
                sections.setdefault(getattr(param, "rich_help_panel", None) or default, []).append(record)
        _write(formatter, sections)


class Group(_WithHelp, typer.core.TyperGroup):
    """A group whose commands are listed under the headings that they name (`rich_help_panel`), in plain text."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write each heading with its commands and their summaries."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            heading = getattr(command, "rich_help_panel", None) or "Commands"
            sections.setdefault(heading, []).append((name, command.get_short_help_str(limit=100)))
        _write(formatter, sections)


def _write(formatter: Any, sections: dict[str, list[tuple[str, str]]]) -> None:
    width = max(len(name) for rows in sections.values() for name, _ in rows)
    for heading, rows in sections.items():
        if rows:
            with formatter.section(heading):
                formatter.write_dl([(f"{name:{min(width, 30)}}", text) for name, text in rows])


def _typer(name: str, summary: str) -> typer.Typer:
    return typer.Typer(
        name=name,
        cls=Group,
        help=summary,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )


app = _typer("gemmfleet", "Tune GPU GEMM kernels across a fleet, and explain every shape that failed.")
# registers the shells that typer completes; the options of its own would load pydantic in every command
typer.completion.get_completion_inspect_parameters()


def _version(given: bool) -> None:
    if given:
        typer.echo(f"gemmfleet {__version__}")
        raise typer.Exit


def _flag(name: str, text: str, callback: Callable[..., Any]) -> Any:
    return typer.Option(False, name, callback=callback, is_eager=True, expose_value=False, help=text)


@app.callback()
def root(
    version: bool = _flag("--version", "Show the version.", _version),
    install_completion: bool = _flag(
        "--install-completion", "Install completion for the shell in use.", typer.completion.install_callback
    ),
    show_completion: bool = _flag(
        "--show-completion", "Print the completion script for the shell in use.", typer.completion.show_callback
    ),
) -> None:
    """Exit codes: 0 all tuned or skipped; 1 some failed; 2 bad input or usage; 3 no usable node; 130 interrupted."""


def _add(to: typer.Typer, heading: str | None, /, **commands: Callable[..., Any]) -> None:
    """Add commands to a group, each by the name that is typed."""
    for name, command in commands.items():
        to.command(name.rstrip("_").replace("_", "-"), cls=Command, rich_help_panel=heading)(flat(command))


def _add_group(heading: str, name: str, summary: str, **commands: Callable[..., Any]) -> None:
    group = _typer(name, summary)
    _add(group, None, **commands)
    app.add_typer(group, rich_help_panel=heading)


_add(
    app, "Tune", tune=tune.tune, recheck=tune.recheck, bench=tune.bench, resume=runs.resume, retry=runs.retry,
    cancel=runs.cancel,
)  # fmt: skip
_add(app, "Look", status=runs.status, logs=runs.logs, explain=runs.explain)
_add_group("Look", "runs", "List runs, and remove old ones.", list=runs.list_, prune=runs.prune)
_add(
    app, "Results", analyze=results.analyze, compare=results.compare, report=runs.report, gain=results.gain,
    verify=results.verify, publish=results.publish,
)  # fmt: skip
_add_group(
    "Fleet", "nodes", "Check nodes; add them to a running run, or drain them.", check=fleet.check_nodes, add=fleet.add,
    drain=fleet.drain,
)  # fmt: skip
_add(app, "Fleet", selftest=fleet.selftest)
_add_group("Fleet", "inventory", "Check an inventory, or print its JSON schema.", check=fleet.check_inventory)
_add_group("Fleet", "image", "Build an image with AITER on your own base.", build=fleet.build_image)
_add_group(
    "Files", "shapes", "Make and check shape lists.", check=shapes.check, from_model=shapes.from_model,
    from_log=shapes.from_log, capture=shapes.capture,
)  # fmt: skip
_add_group(
    "Files", "db", "Merge, check, compare, export and restore tuned tables.", merge=files.merge, check=files.check,
    diff=files.diff, undo=files.undo, export=files.export,
)  # fmt: skip
_add_group(
    "Files", "configs", "Merge, check and restore Triton configs of AITER and vLLM.", merge=files.merge_configs,
    undo=files.undo_configs, check=files.check_configs,
)  # fmt: skip
