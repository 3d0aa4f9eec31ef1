"""python -m benchmarks.search [--tree TREE] [--drawn N] [--out JSON]: the search beside an exhaustive one.

Four shapes on one GPU. Each is searched as `tune` does, and then all of N legal configs are measured that a seed draws
evenly from the product of all knobs. The bound: the search's winner takes at most 3 % longer than the best of those.

Without a tree the kernel is the stand-in of the tests (tests/standins/aiter/triton_gemm.py), a plain Triton GEMM with
split-K behind a wrapper like AITER's; with one, AITER's own a16w16 and a8w8.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.figure import Figure, LeftOutError, show
from tests.standins.aiter.triton_gemm import make, values
from worker.protocol import Spec, SpecShape
from worker.triton_configs.kinds import BY_NAME, ConfigKind
from worker.triton_configs.resolve import CONFIGS, ResolveError, Resolver, folder_name
from worker.tuners.aiter_triton.problem import KindProblem
from worker.tuners.aiter_triton.seeds import portable_values
from worker.tuners.aiter_triton.source import AiterSource
from worker.tuners.aiter_triton.tuner import AiterTritonTuner
from worker.tuners.base import Emit, Place
from worker.tuners.search.measuring_process import NoDeviceError
from worker.tuners.search.space import Space
from worker.tuners.search.target import Target
from worker.tuners.search.tile_config import TileConfig, tile_config

SHAPES = ((16, 1280, 8192), (256, 2112, 7168), (64, 7168, 2048), (512, 4096, 4096))
"""(M, N, K): projections of Llama-3-70B, DeepSeek-V3 and Qwen at decode and at a middle batch."""
FP8 = {"q_dtype_w": "torch.float8_e4m3fn"}
DRAWN, WITHIN = 440, 1.03
LAST = {"M_LEQ_16": values(16, 64, 64), "M_LEQ_64": values(32, 64, 64), "any": values(64, 64, 64)}
"""The stand-in's default file: what a search has to beat."""


PARTS = ("__init__.py", "ops", "jit/core.py", "jit/utils", "utility")
"""Parts of AITER's package that its Triton wrappers need."""


def tree_for(source: Path, folder: Path, arch: str, kinds: Sequence[ConfigKind]) -> Path:
    """A copy of a tree's Triton parts that has a default of each kind for the chip."""
    for part in PARTS:
        path = source / "aiter" / part
        if path.is_dir():
            shutil.copytree(path, folder / "aiter" / part, ignore=shutil.ignore_patterns("*.so", "*.co", "*.hsaco"))
        else:
            (folder / "aiter" / part).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, folder / "aiter" / part)
    for kind in kinds:
        try:
            Resolver(folder, arch).folder(kind.config)
        except ResolveError:
            theirs = Resolver(folder, "gfx950")
            buckets = theirs.read(theirs.folder(kind.config).default).buckets
            text = json.dumps({name: portable_values(values, kind, arch) for name, values in buckets.items()}, indent=4)
            path = folder / CONFIGS / arch / "triton" / "gemm" / folder_name(kind.config) / "DEFAULT.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
    return folder


def families(tree: Path | None) -> list[tuple[str, dict[str, str]]]:
    """Family of each shape, with the key columns that differ from their defaults."""
    return [("a16w16", {})] * 4 if tree is None else [("a16w16", {})] * 2 + [("a8w8", FP8)] * 2


def tuned(tuner: AiterTritonTuner, family: str, key: Mapping[str, int | str], **options: Any) -> dict[str, Any]:
    """Winner of one shape: its row, the number of candidates with a time, and the seconds. RuntimeError without one."""
    messages: list[dict[str, Any]] = []
    spec = Spec(
        "bench-1", "bench", 1, family=family, tuner="aiter-triton", options=options,
        shapes=(SpecShape(1, dict(key)),),
    )  # fmt: skip
    start = time.monotonic()
    tuner.tune(spec, Emit(messages.append))
    wall_s = time.monotonic() - start
    rows = [m["row"] for m in messages if m["type"] == "row"]
    won = next((m["row"] for m in messages if m["type"] == "shape_tuned"), None)
    if won is None:
        raise RuntimeError(f"{family} {dict(key)}: {messages[-1]}")
    timed = len({r["kernelName"] for r in rows if r["us"] > 0})
    return {"us": won["us"], "name": won["kernelName"], "detail": won["detail"], "timed": timed, "wall_s": wall_s}


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn(Space):
    """A space of which only `drawn` are candidates."""

    drawn: Sequence[TileConfig]

    def candidates(self, seeds: Iterable[TileConfig] = (), most: int = 0) -> list[TileConfig]:
        return list(self.drawn)


def drawn_by(count: int) -> Any:
    """Replaces a source's space with one of `count` legal configs, drawn evenly from the product of all knobs."""
    whole_of = AiterSource.space

    def space(self: AiterSource, p: KindProblem, target: Target) -> Space:
        group = "/".join(map(str, p.group_key))
        rng, whole = random.Random(f"0:{group}:{p.m}"), whole_of(self, p, target)
        found: dict[object, TileConfig] = {}
        for _ in range(200 * count):
            c = tile_config({name: rng.choice(values) for name, values in whole.knobs.items()})
            if len(found) < count and whole.is_legal(c):
                found.setdefault(whole.identity(c), c)
        parts = (whole.knobs, whole.plain, whole.is_legal, whole.estimate, whole.identity)
        return Drawn(*parts, drawn=list(found.values()))

    return space


def run(folder: Path, tree: Path | None = None, drawn: int = DRAWN, out: Path | None = None) -> list[Figure]:
    """A figure for each shape. Raises LeftOutError without a GPU."""
    import torch

    if not torch.cuda.is_available():
        raise LeftOutError("needs a GPU that torch sees")
    p: Any = torch.cuda.get_device_properties(0)
    arch = p.gcnArchName.split(":")[0] if torch.version.hip else f"{p.major}{p.minor}"
    amd = {"waves_per_eu": 2, "matrix_instr_nonkdim": 16} if torch.version.hip else {}
    if tree is None:
        root = make(folder / "tree", {"DEFAULT.json": {name: {**v, **amd} for name, v in LAST.items()}}, arch)
    else:
        root = tree_for(tree, folder / "tree", arch, [BY_NAME["a16w16"], BY_NAME["a8w8"]])
    os.environ["GEMMFLEET_CACHE"] = str(folder / "cache")
    kept: dict[str, Any] = {"device": p.name, "date": time.strftime("%Y-%m-%d"), "drawn": drawn, "shapes": {}}
    figures = []
    tuners: dict[str, AiterTritonTuner] = {}
    try:
        for (m, n, k), (family, more) in zip(SHAPES, families(tree), strict=True):
            if family not in tuners:
                tuners[family] = AiterTritonTuner()
                tuners[family].configure({"family": family, "root": str(root)}, Place(folder))
                kept["tuner"] = tuners[family].open()
            key: dict[str, int | str] = {"M": m, "N": n, "K": k, **more}
            fast = tuned(tuners[family], family, key)
            with mock.patch.object(AiterSource, "space", drawn_by(drawn)):
                full = tuned(tuners[family], family, key, search="exhaustive")
            label = f"{family} {m}x{n}x{k}"
            kept["shapes"][label] = {"search": fast, "drawn": full}
            print(label, json.dumps(kept["shapes"][label]), file=sys.stderr, flush=True)
            how = f"{fast['us']:.4g} us after {fast['timed']} candidates in {fast['wall_s']:.1f} s; best of"
            how += f" {full['timed']} drawn {full['us']:.4g} us in {full['wall_s']:.0f} s"
            figures.append(Figure(f"search over exhaustive, {label}", fast["us"] / full["us"], WITHIN, "x", how))
    except NoDeviceError as e:
        raise LeftOutError(str(e)) from e
    finally:
        for tuner in tuners.values():
            tuner.close()
        if out is not None:
            out.write_text(json.dumps(kept, indent=1) + "\n")
    return figures


def main() -> int:
    """Returns the exit code."""
    options = argparse.ArgumentParser(prog="benchmarks.search", description=__doc__)
    options.add_argument("--tree", type=Path, default=None, help="folder that holds `aiter/`")
    options.add_argument("--drawn", type=int, default=DRAWN)
    options.add_argument("--out", type=Path, default=None)
    args = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="gemmfleet-bench-") as folder:
        try:
            figures = run(Path(folder), args.tree, args.drawn, args.out)
        except LeftOutError as e:
            show([], [f"search: {e}"])
            return 0
    show(figures)
    return 0 if all(f.holds for f in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
