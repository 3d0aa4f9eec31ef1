"""Tuners by name, with a user's mistake as a message: names and options checked against worker/tuners/catalog.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.command_hints import command
from orchestrator.errors import InputError
from worker.tuners.catalog import Flag, TunerNotFoundError, TunerSpec, built_in, find_tuner, names


def get_tuner(name: str, *, for_tune: bool = True) -> TunerSpec:
    """The tuner's spec. Raises InputError naming the ones there are; `for_tune`: also where another command runs it."""
    legal = names()
    try:
        spec = find_tuner(name)
    except TunerNotFoundError as e:
        if name in legal:  # its package is broken
            raise InputError(str(e)) from e
        raise InputError(f"unknown tuner {name!r}; there are: {', '.join(legal)}") from e
    if for_tune and spec.own_command:
        raise InputError(f"the tuner {name} has a command of its own: {command(spec.own_command)}")
    return spec


def flags() -> dict[str, tuple[Flag, tuple[str, ...]]]:
    """Flags of `tune` by option, each with the built-in tuners that have it."""
    out: dict[str, tuple[Flag, tuple[str, ...]]] = {}
    for name in built_in():
        for flag in find_tuner(name).flags:
            first, tuners = out.get(flag.option, (flag, ()))
            out[flag.option] = (first, (*tuners, name))
    return out


def in_words(tuners: tuple[str, ...]) -> str:
    """`the tuner aiter`, `the tuners torch and triton`."""
    *first, last = tuners
    return f"the tuners {', '.join(first)} and {last}" if first else f"the tuner {last}"


def check_family(spec: TunerSpec, family: str, options: Mapping[str, Any]) -> None:
    """Raise InputError if the tuner has no candidates for the family."""
    known = spec.families(options) if spec.families is not None else (family,)
    if family not in known:
        raise InputError(f"the tuner {spec.name} does not tune family {family}; it tunes {', '.join(known)}")


def check_tuner_options(spec: TunerSpec, options: Mapping[str, Any]) -> None:
    """Raise InputError where the tuner does not take these options, before anything starts."""
    try:
        spec.parse_options(options)
    except ValueError as e:
        own = {flag.option for flag in spec.flags}
        foreign: dict[tuple[str, ...], list[str]] = {}
        for option, (flag, tuners) in flags().items():
            if option in options and option not in own:
                foreign.setdefault(tuners, []).append(flag.flag)
        if not foreign:
            raise InputError(str(e)) from e
        misplaced = "; ".join(
            f"{', '.join(strange)}: for {in_words(tuners)} only" for tuners, strange in foreign.items()
        )
        raise InputError(f"{misplaced}, and this is {spec.name}") from e
