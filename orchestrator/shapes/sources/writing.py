"""Writing a list that a source made: padded where asked, to a file that is never overwritten unasked or to stdout."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from orchestrator.errors import InputError
from orchestrator.shapes.model import Shape, render_shapes
from orchestrator.shapes.sources.pad_m import Level, pad
from worker.families import Family

Key = tuple[int | str, ...]


def finished(keys: Iterable[Key], family: Family, level: Level | None) -> tuple[list[Key], list[str]]:
    """(the keys to write, sentences about it)."""
    listed = list(keys)
    if level is None:
        return listed, []
    if "B" in family.key_names:
        return listed, [f"--pad-m changes nothing: AITER looks {family.name} up by the exact M"]
    points, saving = pad(listed, family, level)
    return list(points), [str(saving)]


def write_list(path: Path, keys: Iterable[Key], family: Family, *, force: bool = False) -> None:
    """Write a shape list that `tune` reads. Raises InputError where the file is there and `force` is not given."""
    text = render_shapes((Shape(i, key) for i, key in enumerate(keys, 1)), family)
    try:
        if force:
            from orchestrator.userfiles import write_atomic

            write_atomic(path, lambda f: print(text, end="", file=f))
            return
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with os.fdopen(fd, "w", encoding="utf-8") as f:
            f.write(text)
    except FileExistsError:
        raise InputError(f"{path} is there already; give another name with -o, or --force to replace it") from None
    except OSError as e:
        raise InputError(f"{path}: cannot be written: {e.strerror or e}") from e
