"""Merging 10,000 rows into a tuned DB of 100,000 rows, records of provenance and the kept old state included."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pandas as pd

from benchmarks.figure import Figure
from orchestrator.families import get_family
from orchestrator.tables.merge import merge
from orchestrator.tables.merge_input import open_sources

FAMILY = get_family("a8w8_blockscale")
OLD, NEW, TIMES = 100_000, 10_000, 3


def run(folder: Path) -> list[Figure]:
    """Half of the newcomers win, half are new keys; the peer only reads the table with pandas and writes it again."""
    merged, peer = [], []
    for turn in range(TIMES):
        db, new = folder / f"{turn}.csv", folder / f"{turn}.new.csv"
        _table(new, range(OLD - NEW // 2, OLD + NEW // 2), 5.0)
        _table(db, range(OLD), 10.0)
        _merge(db, db.with_name("first.csv"), OLD)
        os.replace(db.with_name("first.csv"), db)
        os.replace(db.with_name("first.csv.provenance.jsonl"), db.with_name(f"{db.name}.provenance.jsonl"))
        began = time.perf_counter()
        _merge(new, db, NEW)
        merged.append(time.perf_counter() - began)
        began = time.perf_counter()
        pd.read_csv(db).to_csv(folder / "peer.csv", index=False)
        peer.append(time.perf_counter() - began)
    best, other = min(merged), min(peer)
    how = f"{NEW:,} rows into {OLD:,}, provenance of all rows, fastest of {TIMES}"
    return [
        Figure("merge into the tuned DB", best, 2.0, "s", how),
        Figure(
            "the same, over the peer", best / other, 4.0, "times", f"pandas reads and writes the table: {other:.2f} s"
        ),
    ]


def _merge(new: Path, into: Path, expected: int) -> None:
    sources = open_sources([new], [], into, FAMILY.name)
    report = merge(sources.newcomers(), into, FAMILY, profile=sources.beside(), facts=sources.facts)
    changed = report.count("added") + report.count("replaced")
    if changed != expected:
        raise SystemExit(f"{changed} rows were written, {expected} expected")


def _table(path: Path, rows: range, us: float) -> None:
    with path.open("w") as f:
        f.write(",".join(FAMILY.tuned_header) + "\n")
        for i in rows:
            m, n, t = i % 64 + 1, 64 * (i // 64) + 64, us + i % 97 * 0.01
            name = f"a8w8_blockscale_1x128x128_256x16x64x256_16x16_16x16_1x1_{i % 40}"
            f.write(
                f"gfx950,256,{m},{n},7168,ck,{i % 40},0,{t:.4f},{name},{2 * m * n * 7168 / t / 1e6:.4f},20.25,0.0\n"
            )
