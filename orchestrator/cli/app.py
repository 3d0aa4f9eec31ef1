"""The typer application over the table of commands: a command's module is imported when the command is run."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import typer
import typer.completion
import typer.core
import typer.main

from orchestrator.cli.commands import COMMANDS, HELP, OPTIONS, SUMMARY, VERSION, Entry, help_text
from orchestrator.cli.options import flat


class Completion(NamedTuple):
    """A command name offered to the shell, with the attributes that click's CompletionItem has."""

    value: str
    help: str
    type: str = "plain"


class Command(typer.core.TyperCommand):
    """A command whose options are listed under the headings that they name (`rich_help_panel`), in plain text."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, then options without a heading, then each heading's."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                default = "Arguments" if param.param_type_name == "argument" else "Options"
                sections.setdefault(getattr(param, "rich_help_panel", None) or default, []).append(record)
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


class Group(typer.core.TyperGroup):
    """A group over entries that are listed under headings; only the command that is run is imported."""

    headings: Mapping[str, Sequence[Entry]] = {}

    def __init__(self, *, entries: Sequence[Entry] = (), **attrs: Any) -> None:
        super().__init__(**attrs)
        if entries:
            self.headings = {"Commands": entries}
        self.commands = _Commands({e.name: e for some in self.headings.values() for e in some})

    def get_help_option(self, ctx: Any) -> Any:
        """Return --help with a default: typer loads pydantic to read that an option without one is not given."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.default = False
        return option

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands in the order of the table."""
        return list(self.commands)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help as `help_of` prints it."""
        options = HELP if ctx.parent else OPTIONS
        formatter.write(help_text(ctx.command_path, self.help or "", options, self.headings))

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Return the commands and options that begin with `incomplete`."""
        entries = [e for some in self.headings.values() for e in some if e.name.startswith(incomplete)]
        options = super(typer.core.TyperGroup, self).shell_complete(ctx, incomplete)
        return [*(Completion(e.name, e.summary) for e in entries), *options]


class _Commands(UserDict[str, Any]):
    """Commands by name; an entry becomes its command the first time that it is looked up."""

    def __getitem__(self, name: str) -> Any:
        value = self.data[name]
        if isinstance(value, Entry):
            value = self.data[name] = _load(value)
        return value


def _load(entry: Entry) -> Any:
    """Return the click command or group of an entry."""
    if entry.commands:
        return Group(
            name=entry.name, help=entry.summary, entries=entry.commands, no_args_is_help=True, rich_markup_mode=None
        )
    module, _, function = entry.target.partition(":")
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    single.command(entry.name, cls=Command)(flat(getattr(import_module(module), function)))
    return typer.main.get_command(single)


class Root(Group):
    """`gemmfleet` itself."""

    headings = COMMANDS


app = typer.Typer(
    name="gemmfleet",
    cls=Root,
    help=SUMMARY,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
# registers the shells that typer completes; typer's own options would load pydantic in every command
typer.completion.get_completion_inspect_parameters()


def _version(given: bool) -> None:
    if given:
        typer.echo(VERSION)
        raise typer.Exit


def _flag(name: str, callback: Callable[..., Any]) -> Any:
    return typer.Option(False, name, callback=callback, is_eager=True, expose_value=False, help=OPTIONS[name])


@app.callback()
def root(
    version: bool = _flag("--version", _version),
    install_completion: bool = _flag("--install-completion", typer.completion.install_callback),
    show_completion: bool = _flag("--show-completion", typer.completion.show_callback),
) -> None:
    """Exit codes: 0 all tuned or skipped; 1 some failed; 2 bad input or usage; 3 no usable node; 130 interrupted."""
