"""python -m benchmarks.recheck: what a recheck costs beside tuning again, and what it misses.

Two builds are replayed, which an H200 measured (benchmarks/data: two series of Triton kernels, whose candidates
differ): all candidates of 21 shapes with their times, and the seconds of each exhaustive search.
"""

from __future__ import annotations

import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.figure import Figure, show
from orchestrator.ledger.reader import LedgerReader
from orchestrator.paths import RunPaths, list_runs
from orchestrator.results.recheck import slot_seconds

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(__file__).parent / "data"
OLD, NEW = "h200_build_a.json", "h200_build_b.json"
FAMILIES = ("a16w16", "a8w8", "a4w4_blockscale")
START_S = 11.0
"""Seconds until a tuner of Triton kernels was ready on that H200, nearly all of them imports."""
COPIES = 50
"""Rows that each recorded shape stands for where seconds count: a table of 350 rows."""
CHECKED = 4
"""Kernels that a check measures of a row: its winner and three runners-up."""
BETTER = 0.03
"""A row is worth another tuning where a full one is faster by more."""


@dataclass(frozen=True)
class Shape:
    """A recorded shape: its candidates' times in microseconds by name (-1: it failed), and the seconds of each."""

    m: int
    n: int
    k: int
    us: Mapping[str, float]
    each_s: float


def recorded(series: str, family: str) -> list[Shape]:
    """The shapes of a family in a series."""
    document = json.loads((DATA / series).read_text())
    out = []
    for label, by_m in document["rows"].items():
        of, _, sizes = label.partition(" ")
        if of == family:
            _, n, k = sizes.split(" ")[0].split("x")
            each_s = document["walls"][label]["exhaustive_s"] / sum(len(rows) for rows in by_m.values())
            for m, rows in by_m.items():
                us = {name: us if status == "ok" else -1.0 for name, us, status, _ in rows}
                out.append(Shape(int(m), int(n), int(k), us, each_s))
    return out


def recording(path: Path, shapes: Sequence[Shape], copies: int) -> Path:
    """A profile for the tuner replay; the copies of a shape differ in M alone."""
    with path.open("w", newline="") as f:
        out = csv.writer(f)
        out.writerow(("gfx", "cu_num", "M", "N", "K", "kernelId", "splitK", "us", "kernelName", "errRatio", "status"))
        for s, copy in ((s, c) for s in shapes for c in range(copies)):
            for i, (name, us) in enumerate(s.us.items()):
                status = "ok" if us > 0 else "error"
                out.writerow(("sm_90", 132, 100 * s.m + copy, s.n, s.k, i, 0, us, name, 0, status))
    return path


def shape_list(path: Path, shapes: Sequence[Shape], copies: int) -> Path:
    """The shapes as `tune` reads them."""
    lines = [f"{100 * s.m + c},{s.n},{s.k}" for s in shapes for c in range(copies)]
    path.write_text("\n".join(["M,N,K", *lines]) + "\n")
    return path


def as_h200(build: Path) -> tuple[str, ...]:
    """Options by which the tuner replay plays a recording of an H200."""
    return "-O", f"recording={build}", "-O", "gfx=sm_90", "-O", "cu_num=132"


class Fleet:
    """One slot of this machine, and the command line on it."""

    def __init__(self, folder: Path, family: str, tuner: str, **chip: object) -> None:
        folder.mkdir()
        self.folder, self.runs = folder, folder / "runs"
        facts = "".join(f", {k}: {v}" for k, v in chip.items())
        nodes = f"nodes:\n  here: {{gpus: [0], workdir: {folder / 'nodes'}}}\n"
        (folder / "inv.yaml").write_text(f"defaults: {{family: {family}, tuner: {tuner}{facts}}}\n{nodes}")

    def gemmfleet(self, *words: object, cache: str = "cache") -> dict[str, Any]:
        """Run a command with --json. Its exit code 1 says that rows are to be tuned, or that some failed."""
        common = ("-i", self.folder / "inv.yaml", "--runs", self.runs, "--json")
        argv = [sys.executable, "-m", "orchestrator", *map(str, (*words, *common))]
        env = {**os.environ, "GEMMFLEET_CACHE": str(self.folder / cache)}
        done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True)
        if done.returncode not in (0, 1):
            raise SystemExit(done.stdout + done.stderr)
        return dict(json.loads(done.stdout))

    def latest(self) -> RunPaths:
        return list_runs(self.runs)[-1]


def seconds(paths: RunPaths) -> float:
    """Seconds of slots of a run, with the tuner's start."""
    with LedgerReader.open_readonly(paths.ledger) as ledger:
        return slot_seconds(ledger)


def run(folder: Path) -> list[Figure]:
    """Both parts by replay."""
    return [*_cost(folder / "cost"), *_quality(folder)]


def _cost(folder: Path) -> Iterator[Figure]:
    """Seconds: the check in the recorded candidates' mean time, full tunings as recorded."""
    fleet = Fleet(folder, "a16w16", "replay", gfx="sm_90", cu_num=132)
    old, new = recorded(OLD, "a16w16"), recorded(NEW, "a16w16")
    shapes = shape_list(folder / "shapes.csv", old, COPIES)
    builds = [recording(folder / f"{i}.csv", of, COPIES) for i, of in enumerate((old, new))]
    fleet.gemmfleet("tune", shapes, *as_h200(builds[0]))
    each = CHECKED * statistics.mean(s.each_s for s in new)
    now = (*as_h200(builds[1]), "-O", f"seconds_per_shape={each}", "-O", f"start_seconds={START_S}")
    found = fleet.gemmfleet("recheck", fleet.latest().root, *now, "--only-check")
    check_s = seconds(RunPaths(fleet.runs / found["runs"][0]))
    each_s = {(100 * s.m + c, s.n, s.k): s.each_s * len(s.us) for s in new for c in range(COPIES)}
    queued = [tuple(r["key"][c] for c in "MNK") for r in found["rows"] if r["verdict"] != "good"]
    full_s, again_s = (START_S + sum(each_s[key] for key in keys) for keys in (each_s, queued))
    how = f"a16w16, {len(each_s)} rows (7 shapes, {COPIES} times), 3 runners-up of 60 candidates, one slot:"
    how += f" {check_s:.1f} s to {full_s:.0f} s, {START_S:g} s of start in each"
    yield Figure("recheck's seconds over a full tuning's", check_s / full_s, 0.1, "", how)
    how = f"{len(queued)} rows queued: {found['counts']}"
    yield Figure("the same with the tuning of the queued rows", (check_s + again_s) / full_s, 1.0, "", how)


def _quality(folder: Path) -> Iterator[Figure]:
    """Rows found and missed, over all families. The truth is a full tuning of the new build."""
    stale = found_stale = known = rows = queued = 0
    regret: list[float] = []
    for family in FAMILIES:
        fleet = Fleet(folder / family, family, "replay", gfx="sm_90", cu_num=132)
        old, new = recorded(OLD, family), recorded(NEW, family)
        shapes = shape_list(fleet.folder / "shapes.csv", old, 1)
        builds = [recording(fleet.folder / f"{i}.csv", of, 1) for i, of in enumerate((old, new))]
        fleet.gemmfleet("tune", shapes, *as_h200(builds[0]))
        table = fleet.latest().root
        found = fleet.gemmfleet("recheck", table, *as_h200(builds[1]), "--only-check")
        verdicts = {tuple(r["key"][c] for c in "MNK"): r for r in found["rows"]}
        for was, s in zip(old, new, strict=True):
            row = verdicts[100 * s.m, s.n, s.k]
            best = min(us for us in s.us.values() if us > 0)
            kept = s.us.get(row["kernel"], -1.0)
            worth = kept <= 0 or kept > best * (1 + BETTER)
            good = row["verdict"] == "good"
            rows, queued, stale = rows + 1, queued + (not good), stale + worth
            found_stale += worth and not good
            known += worth and any(0 < us < kept / (1 + BETTER) for n, us in s.us.items() if n in was.us)
            regret.append(kept / best if good else 1.0)
    how = f"{rows} rows of {len(FAMILIES)} families, {queued} queued; of {stale} that a full tuning improves by over"
    how += f" {BETTER:.0%}, {known} by a kernel that the old build had; {found_stale} are found"
    yield Figure("rows found that are worth it", found_stale / max(1, stale), 0.5, "", how, at_least=True)
    worst = f"after the queued rows are tuned; the worst row {max(regret):.3f}"
    yield Figure("table after a recheck over a full tuning's", statistics.geometric_mean(regret), 1.03, "x", worst)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="gemmfleet-bench-") as scratch:
        show(run(Path(scratch)))
