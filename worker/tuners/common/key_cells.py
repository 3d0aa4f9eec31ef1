"""Cells of a shape's key, read for the tuners that compute themselves. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Key = Mapping[str, int | str]


class UnsupportedError(Exception):
    """This shape, or this candidate, cannot be run here; the text says what would be needed."""


def size_of(key: Key, column: str) -> int:
    """A dimension. Raises UnsupportedError for what is no whole number from 1 to 2^31-1."""
    try:
        value = int(key[column])
    except (KeyError, ValueError) as e:
        raise UnsupportedError(f"the shape has no whole number {column}") from e
    if not 1 <= value < 2**31:
        raise UnsupportedError(f"{column} is {value}; it must be from 1 to 2^31-1")
    return value


def flag_of(key: Key, column: str) -> bool:
    """True or False as text or number; False where the column is missing. Raises UnsupportedError."""
    value = str(key.get(column, "False")).strip().lower()
    if value not in ("true", "false", "0", "1"):
        raise UnsupportedError(f"{column} is {key[column]!r}, neither True nor False")
    return value in ("true", "1")


def format_of(key: Key, column: str, legal: Sequence[str], default: str) -> str:
    """A format's name without `torch.`; `default` where the column is missing. Raises UnsupportedError for others."""
    name = str(key.get(column, default)).strip().removeprefix("torch.")
    if name not in legal:
        raise UnsupportedError(
            f"{column} is {key[column]!r}; this tuner takes " + ", ".join(f"torch.{d}" for d in legal)
        )
    return name
