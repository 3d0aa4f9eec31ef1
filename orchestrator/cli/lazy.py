"""Commands that are imported when they are run: an entry of the command table, and the click group made from entries.

`gemmfleet --help` and shell completion read names and summaries from the table alone, so they import no command.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import typer
import typer.core
import typer.main


@dataclass(frozen=True, slots=True)
class Entry:
    """A command: its name, its one-line summary, and the function that it runs (`module:function`); of a group, its
    commands instead."""

    name: str
    summary: str
    target: str = ""
    commands: tuple[Entry, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
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

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands in the order of the table."""
        return list(self.commands)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the headings with their commands, all summaries in one column."""
        width = max(map(len, self.commands))
        formatter.write_paragraph()
        for heading, entries in self.headings.items():
            formatter.write_heading(heading)
            with formatter.indentation():
                formatter.write_dl([(e.name.ljust(width), e.summary) for e in entries])

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
    single.command(entry.name, cls=Command)(getattr(import_module(module), function))
    return typer.main.get_command(single)
