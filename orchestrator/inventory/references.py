"""References to the environment in an inventory: `${env:NAME}` in a text.

A reference stays as written in the model and in every file that this program writes. It is resolved in memory when it
is used (`load.resolved`), and its value is passed on but never stored: workers get values on the standard input of the
node's launcher. `value_hider` makes messages safe to keep.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from orchestrator.errors import InventoryError

REFERENCE_RE = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)\}")
_BROKEN_RE = re.compile(r"\$\{\s*env\s*:|\$\{env\b")


def reference_names(text: str) -> tuple[str, ...]:
    """The variables that a text refers to, in order, each once."""
    return tuple(dict.fromkeys(REFERENCE_RE.findall(text)))


def has_reference(text: str) -> bool:
    """Return whether a text refers to the environment."""
    return REFERENCE_RE.search(text) is not None


def with_filler(text: str, filler: str = "x") -> str:
    """The text with each reference replaced by `filler`, so that its form can be checked before the values are known.

    Raises ValueError if something looks like a reference but is malformed.
    """
    filled = REFERENCE_RE.sub(lambda _: filler, text)
    if _BROKEN_RE.search(filled):
        raise ValueError("a reference is written ${env:NAME}, NAME of letters, digits and '_', not a digit first")
    return filled


def texts(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """(path, text) of every text within plain data; paths such as `docker.volumes.0`."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, (Mapping, list, tuple)):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from texts(item, f"{path}.{key}" if path else str(key))


def value_hider(value: Any) -> Callable[[str], str]:
    """Return a function that replaces the values of this data's references in a text by the references. It is for
    messages that we keep: an error of a host or a registry may contain its own name. Only whole words are replaced, and
    no values shorter than three characters.
    """
    env = os.environ
    used = {
        env[name]: name for _, text in texts(value) for name in reference_names(text) if len(env.get(name, "")) >= 3
    }
    for private, name in list(used.items()):  # Docker may name an image's registry alone
        registry = private.partition("/")[0]
        if registry != private and ("." in registry or ":" in registry):
            used.setdefault(registry, name)
    longest_first = "|".join(re.escape(v) for v in sorted(used, key=len, reverse=True)) or r"(?!)"
    pattern = re.compile(f"(?<![A-Za-z0-9])(?:{longest_first})(?![A-Za-z0-9])")
    return lambda text: pattern.sub(lambda m: f"${{env:{used[m[0]]}}}", text)


def unset_references(value: Any, env: Mapping[str, str] = os.environ) -> list[tuple[str, str]]:
    """(path, NAME) of every reference in plain data whose variable is not set."""
    return [(path, name) for path, text in texts(value) for name in reference_names(text) if name not in env]


def describe_unset(name: str) -> str:
    """Words on a reference whose variable is not set, with the way out."""
    return f"${{env:{name}}}, and {name} is not set here: export {name}=... and try again"


def resolve(value: Any, node: str, origin: Callable[[str], str], env: Mapping[str, str] = os.environ) -> Any:
    """Plain data with every reference replaced by its variable's value (our own environment's by default).

    `origin` gives `file:line` of a path within the data. Raises InventoryError with one fault for each missing
    variable, which names file, line, node and NAME, and never a value.
    """
    faults = []
    for path, name in unset_references(value, env):
        faults.append(f"{origin(path)}: node {node}: {path} refers to {describe_unset(name)}")
    if faults:
        raise InventoryError(list(dict.fromkeys(faults)))
    return _resolved(value, env)


def _resolved(value: Any, env: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return REFERENCE_RE.sub(lambda m: env[m[1]], value)
    if isinstance(value, Mapping):
        return {key: _resolved(item, env) for key, item in value.items()}
    return type(value)(_resolved(item, env) for item in value) if isinstance(value, (list, tuple)) else value
