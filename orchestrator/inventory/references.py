"""References to the environment: `${env:NAME}` in an inventory (law 11).

They stay as they are written in the model and in every file that this program writes. They are resolved at the
moment of use, in memory, and what comes out is handed on and never kept: values for workers reach a node on the
standard input of its launcher.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from orchestrator.errors import InventoryError

REFERENCE_RE = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)\}")
_BROKEN_RE = re.compile(r"\$\{\s*env\s*:|\$\{env\b")


def names(text: str) -> tuple[str, ...]:
    """The variables that a text refers to, in order, each once."""
    return tuple(dict.fromkeys(REFERENCE_RE.findall(text)))


def has_reference(text: str) -> bool:
    """Whether a text refers to the environment."""
    return REFERENCE_RE.search(text) is not None


def masked(text: str, filler: str = "x") -> str:
    """The text with `filler` for each reference: its form can be checked before its values are known.

    Raises ValueError where something looks like a reference and is none.
    """
    out = REFERENCE_RE.sub(lambda _: filler, text)
    if _BROKEN_RE.search(out):
        raise ValueError("a reference is written ${env:NAME}, NAME of letters, digits and '_', not a digit first")
    return out


def texts(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """(path, text) of every text within plain data; paths such as `docker.volumes.0`."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from texts(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from texts(item, f"{path}.{i}")


def masker(value: Any, environ: Mapping[str, str] | None = None) -> Callable[[str], str]:
    """Function that puts the references of this data back in place of their values, where these are whole words. For
    messages that are kept: those of a host or a registry may repeat its own name. Values of fewer than three
    characters stay.
    """
    env = os.environ if environ is None else environ
    used = {env[name]: name for _, text in texts(value) for name in names(text) if len(env.get(name, "")) >= 3}
    for private, name in list(used.items()):  # Docker may name an image's registry alone
        registry = private.partition("/")[0]
        if registry != private and ("." in registry or ":" in registry):
            used.setdefault(registry, name)
    if not used:
        return lambda text: text
    longest_first = "|".join(re.escape(v) for v in sorted(used, key=len, reverse=True))
    pattern = re.compile(f"(?<![A-Za-z0-9])(?:{longest_first})(?![A-Za-z0-9])")
    return lambda text: pattern.sub(lambda m: f"${{env:{used[m[0]]}}}", text)


def missing(value: Any, environ: Mapping[str, str] | None = None) -> list[tuple[str, str]]:
    """(path, NAME) of every reference within plain data whose variable is not set."""
    env = os.environ if environ is None else environ
    return [(path, name) for path, text in texts(value) for name in names(text) if name not in env]


def resolve(
    value: Any,
    node: str,
    origin: Callable[[str], str],
    environ: Mapping[str, str] | None = None,
) -> Any:
    """Plain data with every reference replaced by its variable's value (our own environment's by default).

    `origin` gives `file:line` of a path within the data. Raises InventoryError with one fault a missing
    variable, naming file, line, node and NAME; no fault holds a value.
    """
    env = os.environ if environ is None else environ
    faults = [
        f"{origin(path)}: node {node}: {path} refers to ${{env:{name}}}, and {name} is not set here:"
        f" export {name}=... and try again"
        for path, name in missing(value, env)
    ]
    if faults:
        raise InventoryError(list(dict.fromkeys(faults)))
    return _resolved(value, env)


def _resolved(value: Any, env: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return REFERENCE_RE.sub(lambda m: env[m[1]], value)
    if isinstance(value, Mapping):
        return {key: _resolved(item, env) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_resolved(item, env) for item in value)
    return value
