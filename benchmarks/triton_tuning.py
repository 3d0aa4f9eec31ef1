"""The tuner `triton` as its benchmark calls it: shapes, one tuning, candidates side by side, the file of results."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.figure import Figure, LeftOutError, show
from worker.protocol import Spec, SpecShape
from worker.tuners.base import Emit, Place
from worker.tuners.triton.tuner import TritonTuner

CANDIDATES = 60
"""Most candidates that are compared; --candidates changes it."""
FP8 = {"q_dtype_w": "torch.float8_e4m3fn"}
NAMED: dict[str, dict[str, str]] = {"a16w16": {}, "a8w8": FP8, "a4w4_blockscale": {}}
SINGLES = ((16, 1536, 7168), (512, 7168, 2048), (4096, 6144, 4096))
"""DeepSeek-V3's q_a projection at decode, its kv_b-sized projection at a middle batch, Llama-3-8B's qkv at prefill."""
GROUP = ((16, 1280, 8192), (64, 1280, 8192), (256, 1280, 8192), (1024, 1280, 8192))
"""Llama-3-70B's qkv projection of one of eight GPUs."""


@dataclass(slots=True)
class Tuned:
    """Result of one call of the tuner: winners and rows by M, seconds by kind."""

    wall_s: float
    winners: dict[int, dict[str, Any]]
    rows: dict[int, list[dict[str, Any]]]
    spent: dict[str, float]
    account: dict[str, float]


class Bench:
    """One tuner, kept open, and the file that results go into."""

    def __init__(
        self,
        folder: Path,
        out: Path,
        until: float,
        families: Sequence[str] = tuple(NAMED),
        candidates: int = CANDIDATES,
    ) -> None:  # fmt: skip
        os.environ["GEMMFLEET_CACHE"] = str(folder)
        self.folder, self.out, self.until = folder, out, until
        self.families, self.candidates = families, candidates
        self.tuner = TritonTuner()
        self.tuner.configure({}, Place(folder))
        self.device = self.tuner.open()
        self.result: dict[str, Any] = {"device": self.device, "date": time.strftime("%Y-%m-%d"), "driver": driver()}
        self.result["candidates_at_most"] = candidates

    def tune(
        self, family: str, shapes: Sequence[tuple[int, int, int]], only: Sequence[str] = (), **options: Any
    ) -> Tuned:
        """Tune the shapes as one group; `only`: rank these candidates of each."""
        messages: list[dict[str, Any]] = []
        keys: list[dict[str, int | str]] = [{"M": m, "N": n, "K": k, **NAMED[family]} for m, n, k in shapes]
        spec = Spec(
            "bench-1", "bench", 1, family=family, tuner="triton", options=options,
            shapes=tuple(SpecShape(i, dict(key)) for i, key in enumerate(keys)),
            only={str(i): [[name] for name in only] for i in range(len(keys))} if only else {},
        )  # fmt: skip
        start = time.monotonic()
        spent = self.tuner.tune(spec, Emit(messages.append))
        wall = time.monotonic() - start
        winners = {shapes[m["shape"]][0]: m["row"] for m in messages if m["type"] == "shape_tuned"}
        rows: dict[int, list[dict[str, Any]]] = {m: [] for m, _, _ in shapes}
        for message in messages:
            if message["type"] == "row":
                rows[shapes[message["shape"]][0]].append(message["row"])
            elif message["type"] == "shape_failed":
                raise RuntimeError(f"{family} {shapes[message['shape']]}: {message['reason']}: {message['detail']}")
        account = self.tuner.account
        assert account is not None
        summary = {
            "busy": account.compile_busy,
            "busy_of_all": account.compile_busy_of_all,
            "load_s": account.seconds.get("load", 0.0),
            "idle_s": account.idle_s,
            "wall_s": account.wall_s,
        }
        return Tuned(wall, winners, rows, spent, summary)

    def cold(self, family: str, shapes: Sequence[tuple[int, int, int]], **options: Any) -> Tuned:
        """The same from an empty cache."""
        self.tuner.forget()
        return self.tune(family, shapes, **{"max_candidates": self.candidates, "hints": False, **options})

    def ratio(self, family: str, shape: tuple[int, int, int], name: str, to: str) -> float:
        """Time of one candidate over another's, measured side by side."""
        if name == to:
            return 1.0
        us: dict[str, list[float]] = {name: [], to: []}
        for _ in range(2):
            tuned = self.tune(family, [shape], only=[name, to])
            for row in [*tuned.rows[shape[0]], tuned.winners[shape[0]]]:
                if row["us"] > 0:
                    us[row["kernelName"]].append(row["us"])
        return statistics.median(us[name]) / statistics.median(us[to])

    def keep(self, section: str, key: str, value: Any) -> None:
        """Put a result into the file at once."""
        self.result.setdefault(section, {})[key] = value
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps(self.result, indent=1) + "\n")
        print(f"{section} {key}: {json.dumps(value)[:200]}", file=sys.stderr, flush=True)

    def late(self) -> bool:
        return time.monotonic() > self.until

    def work(self) -> Iterable[tuple[str, tuple[tuple[int, int, int], ...]]]:
        """Each group with its family; a cap leaves out the same of each family."""
        for shapes in (*((single,) for single in SINGLES), GROUP):
            yield from ((family, shapes) for family in self.families)


def label(family: str, shape: tuple[int, int, int]) -> str:
    return f"{family} {'x'.join(map(str, shape))}"


def geomean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(math.log(v) for v in values))


def driver() -> str:
    """The GPU driver's version, "" where it is unknown."""
    argv = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def kept(name: str, folder: Path, run: Callable[[Path, Path], Sequence[Figure]]) -> int:
    """Call `run` with a scratch folder and a new file of raw results in `folder`; show its figures, return the exit
    code."""
    with tempfile.TemporaryDirectory(prefix="gemmfleet-bench-") as scratch:
        out = folder / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.json"
        try:
            figures = run(Path(scratch), out)
        except LeftOutError as e:
            show([], [f"{name}: {e}"])
            return 0
    show(figures)
    print(f"raw results: {out}")
    return 0 if all(f.holds for f in figures) else 1
