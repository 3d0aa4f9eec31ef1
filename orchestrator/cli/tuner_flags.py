"""Flags of `tune` that are made from the tuners' specs, under a heading of each tuner."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

import typer

from orchestrator.tuners import flags, in_words

Command = TypeVar("Command", bound=Callable[..., Any])


def with_tuner_flags(command: Command) -> Command:
    """Replace the command's `**of_tuner` by a parameter for each flag of a built-in tuner."""
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    command.__signature__ = signature.replace(parameters=[*own, *_parameters()])  # type: ignore[attr-defined]
    return command


def given(of_tuner: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the tuner by name, of the flags that were given."""
    return {name: value for name, value in of_tuner.items() if value is not None and value is not False}


def _parameters() -> list[inspect.Parameter]:
    out = []
    for option, (flag, tuners) in sorted(flags().items(), key=lambda f: f[1][1]):
        kind: Any = list[str] if flag.kind is list else flag.kind
        heading = "T" + in_words(tuners).removeprefix("the t")
        metavar = flag.metavar or {int: "N", float: "SECONDS"}.get(flag.kind)
        made = typer.Option(flag.flag, help=flag.help, metavar=metavar, min=flag.minimum, rich_help_panel=heading)
        switch = flag.kind is bool
        annotation: Any = Annotated[kind if switch else kind | None, made]
        default = False if switch else None
        out.append(inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation))
    return out
