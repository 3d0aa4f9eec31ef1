"""Bad input through the command line: one clear message, exit code 2, no traceback, no run folder."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.kits.fleet import Bench

ROOT = Path(__file__).resolve().parents[2]


def test_options(bench: Bench) -> None:
    bench.shapes(1)
    for args, said in (
        (["--family", "a16w61"], "a16w16"),
        (["--tuner", "torhc"], "torch"),
        (["--limit", "gpu"], "label"),
        (["-O", "novalue"], "NAME=VALUE"),
        (["--tuner", "torch", "-O", "nonsense=1", "--plan"], "unknown option 'nonsense'"),
        (["--db", str(bench.root)], str(bench.root)),
    ):
        done = bench.run("tune", *bench.tune_args(more=args))
        assert (done.code, said in done.err) == (2, True), (args, done.err)
        assert not bench.runs.exists()
    assert bench.run("status").code == 2
    assert bench.run("status", "nosuchrun").code == 2
    assert bench.run("tune", "nosuch.csv").code == 2


def test_an_empty_variable_of_make_is_named() -> None:
    for target in ("tune", "plan"):
        done = subprocess.run(["make", target, "SHAPES="], capture_output=True, text=True, check=False, cwd=ROOT)
        assert done.returncode == 2
        assert "error: SHAPES= is empty: name a shapes file" in done.stdout


def test_annotations_travel_with_the_run(bench: Bench) -> None:
    bench.shapes_csv.write_text("model,m,n,k\nllama,1,32,64\n,2,32,64\n")
    done = bench.tune().ok()
    assert "note: read the columns m as M, n as N, k as K" in done.out
    (run,) = bench.runs.iterdir()
    rows = (run / "annotations.csv").read_text().splitlines()
    assert rows[0].startswith("M,N,K,")
    assert [r.rsplit(",", 1)[1] for r in rows] == ["model", "llama", ""]
