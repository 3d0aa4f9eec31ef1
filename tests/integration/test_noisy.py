"""Noisy winners through the real command line: measured again, held back from the table, queued by `retry --noisy`."""

from __future__ import annotations

import re
from pathlib import Path

from tests.kits.fleet import Bench, read_csv

SHAPES, NOISY = 30, range(1, 11)
HEAD = "M,kernelName,kernelId,splitK,us,errRatio,libtype\n"


def record(path: Path, *times: float, kernel: str = "k") -> None:
    """A recording of one kernel: 50 us, but for the noisy shapes these times, the first and the last."""
    rows = [(m, us) for m in range(1, SHAPES + 1) for us in (times if m in NOISY else (50.0,))]
    path.write_text(HEAD + "".join(f"{m},{kernel},1,0,{us},0,replay\n" for m, us in rows))


def test_noisy_winners_are_measured_again_held_back_and_queued_by_retry(bench: Bench) -> None:
    recording, table = bench.root / "recording.csv", bench.root / "tuned.csv"
    bench.shapes_csv.write_text("M,N,K\n" + "".join(f"{m},64,128\n" for m in range(1, SHAPES + 1)))
    options = ["-O", f"recording={recording}", "-O", "gfx=gfx950", "-O", "cu_num=256"]
    record(recording, 30.0, kernel="old")
    assert bench.tune(more=[*options, "--db", str(table)]).code == 0

    record(recording, 44.0, 20.0)
    done = bench.tune(more=options).ok()
    assert "10 winners are noisy" in done.out
    assert re.search(r"measure again: .* retry .*--noisy", done.out)
    stories = [bench.run("explain", f"{m}x64x128").out for m in NOISY]
    assert any("measured twice" in story for story in stories), "within a tenth of the run's time"
    bench.run_plain("db", "merge", bench.paths.root, "--into", table).ok()
    assert {r["us"] for r in read_csv(table)[:10]} == {"30.0"}, "20 us is faster, the upper bound of 44 us is not"

    record(recording, 21.0, 20.0)
    again = bench.run("retry", "--noisy").ok()
    assert "trying 10 noisy winners again" in again.out
    assert "not to be trusted" not in again.out
    bench.check_books(tuned=SHAPES, failed={})
    assert "no winner is noisy" in bench.run("retry", "--noisy").out
    assert bench.run_plain("db", "merge", bench.paths.root, "--into", table).code == 0
    assert {r["us"] for r in read_csv(table)[:10]} == {"20.0"}
