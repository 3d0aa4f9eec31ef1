"""The command line as typer runs it: a group that lists commands from the table, and imports the one that is typed.

`gemmfleet db merge` takes three steps: the root group finds `db` in the table; its group finds `merge`; and
`load_command` imports `orchestrator.cli.db` and makes a typer command of `merge_tables`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

import typer
import typer.completion
import typer.core

from orchestrator import __version__
from orchestrator.cli.commands import HEADINGS, CommandEntry, GroupEntry

WIDEST_NAME = 30
"""Texts of a help page begin at the same column, unless a name is longer than this."""
SUMMARY_LIMIT = 100
"""Characters of a command's line in a list of commands. No line of the table is longer."""


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


class ListedCommand(Command):
    """A command as lists and completion show it: name, heading and summary. `load_command` makes the one that runs."""

    def __init__(self, entry: CommandEntry, heading: str | None) -> None:
        super().__init__(entry.name, help=entry.summary, rich_help_panel=heading)
        self.entry = entry


class Group(_WithHelp, typer.core.TyperGroup):
    """A group whose commands are listed under the headings that they name (`rich_help_panel`), in plain text."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write each heading with its commands and their summaries."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            heading = command.rich_help_panel or "Commands"
            sections.setdefault(heading, []).append((name, command.get_short_help_str(limit=SUMMARY_LIMIT)))
        _write(formatter, sections)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return (name, command, other words) of what was typed, with the command that runs for the listed one."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, load_command(command) if isinstance(command, ListedCommand) else command, rest


class RootGroup(Group):
    """`gemmfleet` itself: typer makes it from `app`, and its commands come from the table."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for heading, entries in HEADINGS.items():
            self.commands.update(_listed(entries, heading))


def _write(formatter: Any, sections: dict[str, list[tuple[str, str]]]) -> None:
    widest = max(len(name) for rows in sections.values() for name, _ in rows)
    width = min(widest, WIDEST_NAME)
    for heading, rows in sections.items():
        if rows:
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), text) for name, text in rows])


def _listed(entries: Iterable[CommandEntry | GroupEntry], heading: str | None) -> dict[str, Any]:
    """Return the commands and groups of the table, by name, without importing a command's module."""
    commands: dict[str, Any] = {}
    for entry in entries:
        if isinstance(entry, CommandEntry):
            commands[entry.name] = ListedCommand(entry, heading)
        else:
            commands[entry.name] = Group(
                name=entry.name,
                help=entry.summary,
                commands=_listed(entry.commands, None),
                no_args_is_help=True,
                rich_markup_mode=None,
                rich_help_panel=heading,
            )
    return commands


def load_command(listed: ListedCommand) -> Any:
    """Import the module of a listed command, and return the typer command that parses its words and runs it."""
    from orchestrator.cli.options import typer_function  # it brings the printer, which a list of commands does not need

    module, _, name = listed.entry.function.partition(":")
    function = getattr(import_module(f"orchestrator.cli.{module}"), name)
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    alone.command(listed.name, cls=Command)(typer_function(function))
    return typer.main.get_command(alone)


app = typer.Typer(
    name="gemmfleet",
    cls=RootGroup,
    help="Tune GPU GEMM kernels across a fleet, and explain every shape that failed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
# registers the shells that typer completes; the options of its own would load pydantic in every command
typer.completion.get_completion_inspect_parameters()


def _version(is_asked: bool) -> None:
    if is_asked:
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
