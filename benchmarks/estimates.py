"""Estimates against the truth: python -m benchmarks.estimates [--tuner torch,bench] [--gpu] [--json]

Every job is run once, on this machine (inventories/local.yaml). Its truth is the wall time of the whole command; held
against it are the range of a first run (planned with an empty runs folder), the estimate with the runs before it at
hand, and what was thought to be left after a third of it (its journal, read up to then).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchestrator.ledger.reader import LedgerReader
from orchestrator.paths import RunConfig, list_runs
from orchestrator.policy import PolicySettings
from orchestrator.policy.apply import apply
from orchestrator.policy.model import State
from orchestrator.view.header import RunHeader
from orchestrator.view.time_left import time_left
from tests.support.books import records

Job = list[tuple[int, int, int]]
SMALL: list[Job] = [
    [(m, 512, 1024) for m in (1, 16, 64)] + [(32, 1024, 512)],
    [(m, 768, 768) for m in (1, 8, 32, 128, 256)],
    [(64, n, 512) for n in (256, 512, 1024)] + [(8, 2048, 1024), (8, 1024, 2048)],
    [(m, 1024, 1024) for m in (4, 16, 64, 256)] + [(m, 512, 512) for m in (4, 64)],
    [(16, 2048, 2048), (128, 1024, 512)],
    [(m, 256, 2048) for m in (1, 2, 4, 8, 16, 32, 64, 128)],
]
"""Shapes on a CPU; a GPU gets eight times the N and K."""
TUNERS = ("torch", "bench")


def command(tuner: str, shapes: Path, runs: Path, *more: str) -> list[str]:
    """A command as a user would type it."""
    head = ["bench", str(shapes), "--backend", "torch"] if tuner == "bench" else ["tune", str(shapes)]
    tail = [] if tuner == "bench" else ["--tuner", tuner]
    return [sys.executable, "-m", "orchestrator", *head, *tail, "--family", "a16w16", "--runs", str(runs), *more]


def planned(tuner: str, shapes: Path, runs: Path) -> dict[str, Any]:
    """The plan with what is known in that folder."""
    done = subprocess.run(command(tuner, shapes, runs, "--plan", "--json"), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    plan: dict[str, Any] = json.loads(done.stdout)
    return plan


def measure(tuner: str, number: int, job: Job, folder: Path) -> dict[str, Any]:
    """One job, planned twice and run once."""
    shapes = folder / f"{tuner}-{number}.csv"
    shapes.write_text("M,N,K\n" + "".join(f"{m},{n},{k}\n" for m, n, k in job))
    runs = folder / f"{tuner}-runs"
    first = planned(tuner, shapes, folder / "none")
    known = planned(tuner, shapes, runs)
    began = time.monotonic()
    done = subprocess.run(command(tuner, shapes, runs, "--json"), capture_output=True, text=True)
    truth = time.monotonic() - began
    if first["range_s"] is None:
        raise SystemExit(f"nobody measured the tuner {tuner} on this chip: the plan gives no range to judge")
    low, high = first["range_s"]
    row: dict[str, Any] = {
        "tuner": tuner, "job": number, "shapes": len(job), "truth_s": round(truth, 1), "code": done.returncode,
        "first_low_s": round(low, 1), "first_high_s": round(high, 1), "first_holds": low <= truth <= high,
    }  # fmt: skip
    if not known["first_guess"]:
        row["before"] = round(known["end_s"] / truth, 3)
        row["before_holds"] = known["range_s"][0] <= truth <= known["range_s"][1]
        left, was = after_a_third(list_runs(runs)[-1].ledger)
        row["third"] = round(left / was, 3) if was > 0 else None
    return row


def after_a_third(path: Path) -> tuple[float, float]:
    """(seconds thought to be left a third after the run's start, seconds that were)."""
    with LedgerReader.open_readonly(path) as ledger:
        about = RunHeader.of(ledger, RunConfig.read(path.with_name("run.yaml")), {})
        journal = records(ledger)
        created, end = float(ledger.meta("created")), float(ledger.meta("ended"))
    now, state = created + (end - created) / 3, State(PolicySettings())
    for t, record in journal:
        if t > now:
            break
        apply(state, record, t)
    left = time_left(state, about, now, driven=True)
    return (left.mid_s if left else 0.0), end - now


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown, with the counts that the promises are about."""
    out = ["| tuner | job | shapes | truth | first run's range | holds | before the start | after a third |"]
    out.append("|---|---:|---:|---:|---:|---|---:|---:|")
    for r in rows:
        ranged = f"{r['first_low_s']:.0f} to {r['first_high_s']:.0f} s"
        holds = "yes" if r["first_holds"] else "**no**"
        ratios = " | ".join(str(r.get(k, "")) for k in ("before", "third"))
        out.append(f"| {r['tuner']} | {r['job']} | {r['shapes']} | {r['truth_s']} s | {ranged} | {holds} | {ratios} |")
    first = [r["first_holds"] for r in rows]
    out.append(f"\nfirst range holds the truth: {sum(first)} of {len(first)}")
    for name, limit in (("before", 2.0), ("third", 1.3)):
        ratios_ = [r[name] for r in rows if r.get(name)]
        good = sum(1 / limit <= x <= limit for x in ratios_)
        out.append(f"{name}, within a factor of {limit}: {good} of {len(ratios_)}")
    return "\n".join(out)


def main(argv: list[str]) -> int:
    """Returns the exit code: 1 where a command failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.estimates")
    parser.add_argument("--tuner", default="torch", help=f"of {', '.join(TUNERS)}, separated by commas")
    parser.add_argument("--jobs", type=int, default=len(SMALL), help="of each tuner")
    parser.add_argument("--limit-s", type=float, default=450.0, help="no job is begun later")
    parser.add_argument("--gpu", action="store_true", help="eight times the N and K")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    until = time.monotonic() + args.limit_s
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="gemmfleet-estimates-") as folder:
        for number in range(1, min(args.jobs, len(SMALL)) + 1):
            for tuner in args.tuner.split(","):
                if time.monotonic() > until:
                    break
                times = 8 if args.gpu else 1
                job = [(m, times * n, times * k) for m, n, k in SMALL[number - 1]]
                rows.append(measure(tuner, number, job, Path(folder)))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(json.dumps(rows, indent=1) if args.json else table(rows))
    return int(any(r["code"] for r in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
