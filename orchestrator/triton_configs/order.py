"""Order file of a shapes list: its candidates compiled for a chip on this machine's cores, without a GPU."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from orchestrator.errors import InputError
from orchestrator.families import get_family
from orchestrator.shapes.reader import read_shapes
from orchestrator.userfiles import write_atomic
from worker.aiter_tree.locate import NotATreeError, choose
from worker.triton_configs.files import ConfigFileError
from worker.triton_configs.kinds import kinds_of
from worker.triton_configs.resolve import ResolveError
from worker.tuners.aiter_triton.order import read, text_of
from worker.tuners.aiter_triton.problem import family_of
from worker.tuners.aiter_triton.spec import Options, kind_of

SAVE_S = 60.0
"""Seconds of compiling that a machine which goes down may cost."""


@dataclass(frozen=True, slots=True)
class Made:
    """Content of an order file: candidates by their status; a point is a shape at one M, bounds of buckets too."""

    family: str
    kind: str
    shapes: int
    points: int
    candidates: dict[str, int]
    notes: list[str]


def tree_of_this_python() -> str:
    """The folder of the AITER that is installed here. Raises InputError."""
    try:
        return str(choose("")[0].root)
    except NotATreeError as e:
        raise InputError(f"{e}, or give --build TREE") from e


def make_order(
    shapes: Path, family: str, root: Path, gfx: str, out: Path, jobs: int, progress: Callable[[int, int], None]
) -> Made:
    """Compile the candidates of a shapes file that `out` does not know yet, and write it; KeyboardInterrupt is raised
    when what was compiled until then is written. Raises InputError, ShapesError, OSError."""
    if not (find_spec("triton") and find_spec("torch")):
        raise InputError("nothing can be compiled here: install gemmfleet[triton,torch]")
    options = _options(family)
    table = get_family(options.family)
    listed = read_shapes(shapes, table)
    try:
        earlier = read(out) if out.exists() else {}
    except ValueError as e:
        raise InputError(f"--out {out}: it is there, and {e}") from e
    from worker.tuners.aiter_triton.compile_order import OrderMaker

    try:
        maker = OrderMaker(root, gfx, options)
    except (ValueError, ResolveError, ConfigFileError) as e:
        raise InputError(f"no order for {gfx}: {e}") from e
    maker.add([s.key_dict(table) for s in listed.shapes], earlier)
    saved = time.monotonic()

    def save(done: int, of: int) -> None:
        nonlocal saved
        progress(done, of)
        if time.monotonic() - saved >= SAVE_S:
            write_atomic(out, text_of(maker.document()))
            saved = time.monotonic()

    try:
        maker.compile(jobs or len(os.sched_getaffinity(0)), save)
    finally:
        document = maker.document()
        write_atomic(out, text_of(document))
    return Made(
        options.family, options.kind, len(listed.shapes), len(document["shapes"]), _counted(document), maker.refused
    )


def _options(family: str) -> Options:
    """Options of the tuner for a family, or a kind of config. Raises InputError."""
    raw = {"family": family}
    kind = next(iter(kinds_of(family)), None)
    if kind is not None and kind.family != family:
        raw = {"family": family_of(kind), "kind": kind.name}
    try:
        options = Options.parse(raw)
        kind_of(options)
    except ValueError as e:
        raise InputError(f"--family {family}: {e}") from e
    return options


def _counted(document: dict[str, Any]) -> dict[str, int]:
    return dict(Counter(c["status"] for point in document["shapes"].values() for c in point["candidates"]))
