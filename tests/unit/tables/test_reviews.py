"""Five reviews of tuned tables in ROCm/aiter, each a test on what `publish` writes for a whole run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.errors import InputError
from orchestrator.paths import RunPaths
from orchestrator.results.export import Request, export, provenance
from orchestrator.tables.checkout import read_output, run_verify
from orchestrator.tables.publish import summary, types_of
from tests.support.aitercheckout import BLOCKSCALE, TILE, checkout, git, line, show, text
from tests.support.ledger_kit import DEVICE, Run, ended, row, started
from worker.families import FAMILIES
from worker.protocol import record

DIGEST = "sha256:" + "ab" * 32
AITER = "e4048607a5" + "0" * 30
P2 = f"{TILE}_p2"
FILE = "aiter/configs/model_configs/a8w8_blockscale_tuned_gemm_llama.csv"
BRANCH = "gemmfleet/llama-a8w8_blockscale"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of AITER's tuner: three shapes with their candidates, on a node that says what it is."""
    folder = tmp_path / "runs" / "r1"
    folder.mkdir(parents=True)
    facts = {"rocm": "7.1.0", "aiter": {"commit": AITER, "image": DIGEST}}
    device = {**DEVICE, "device": "AMD Instinct MI355X", **facts}
    with Run(folder, groups=((1, 2, 3),)) as r:
        with r.ledger.transaction():
            r.ledger.set_meta("tuner", "aiter")
        r.says(
            record("worker_started", 0.5, info={"pid": 7, "image": DIGEST}),
            record("tuner_ready", 0.6, tuner="aiter", device=device, seconds=0.1),
        )
        r.send("g0001-1")
        r.says(started("g0001-1") | {"device": device, "conditions": {"clock_mhz": 2100, "memory_clock_mhz": 2000}})
        for shape in (1, 2, 3):
            kernel = {"kernelName": TILE, "libtype": "cktile", "kernelId": 0}
            r.says(
                record("shape_started", 1.0, attempt="g0001-1", shape=shape),
                row("row", "g0001-1", shape, us=8.0, **kernel),
                row("row", "g0001-1", shape, us=9.0, **{**kernel, "kernelName": P2, "kernelId": 1}),
                row("row", "g0001-1", shape, us=-1, status="wrong", **{**kernel, "kernelName": "x", "kernelId": 9}),
                row("shape_tuned", "g0001-1", shape, us=7.5, **kernel),
            )
        r.says(ended("g0001-1") | {"conditions": {"clock_mhz": 2400}})
        request = Request(
            run="r1", created=0.0, argv=("tune", "llm shapes.csv", "--tuner", "aiter", "-i", "fleet.yaml")
        )
        export(r.ledger, RunPaths(folder), provenance(r.ledger, request))
    return folder


@pytest.fixture
def aiter(tmp_path: Path) -> Path:
    """A checkout that has the second shape in its shared table, with a kernel that the run measured as well."""
    owned = line(BLOCKSCALE, M=2, libtype="cktile", kernelName=P2, kernelId=1, us=6.0)
    return checkout(tmp_path / "aiter", {BLOCKSCALE.tuned_csv: text(BLOCKSCALE, owned)})


def publish(run: Path, aiter: Path, *words: object) -> dict[str, Any]:
    argv = ["publish", str(run), "--onto", str(aiter), "--model", "llama", "--json", *map(str, words)]
    done = CliRunner().invoke(app, argv)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    document: dict[str, Any] = json.loads(done.stdout)
    return {**document, "body": Path(document["text"]).read_text()}


def test_5500_exact_commands_rocm_gpu_and_aiter_commit(run: Path, aiter: Path) -> None:
    found = publish(run, aiter)
    assert found["missing"] == []
    for words in (
        "gemmfleet tune 'llm shapes.csv' --tuner aiter -i fleet.yaml",
        "| GPU | AMD Instinct MI355X |",
        "| chips of a8w8_blockscale | gfx950 with CU count 256 |",
        "| ROCm | 7.1.0 |",
        f"| AITER commit when measured | {AITER} |",
        f"| image digest | {DIGEST} |",
        "| node | n1 |",
        "| GPU clock (MHz) | 2100 to 2400 |",
        "| candidates tried | 9 |",
        "| of them without a right result | 3 |",
        f"| AITER commit that this branch is based on | {git(aiter, 'rev-parse', 'main').strip()} |",
    ):
        assert words in found["body"], words


def test_5500_what_is_not_recorded_is_pointed_out(tmp_path: Path, aiter: Path) -> None:
    alone = tmp_path / f"x_{BLOCKSCALE.tuned_csv}"
    alone.write_text(text(BLOCKSCALE, line(BLOCKSCALE, M=1, libtype="cktile", kernelName=TILE)))
    found = publish(alone, aiter)
    assert found["missing"] == ["GPU", "ROCm", "AITER commit when measured", "run"]
    assert "| ROCm | not recorded |" in found["body"]
    mixed, missing = summary([{"rocm": "7.1", "device": "a"}, {"rocm": "7.2", "device": "a", "tried": 4}])
    assert mixed["ROCm"] == "7.1 (1 row); 7.2 (1 row)"
    assert (mixed["GPU"], mixed["candidates tried"]) == ("a", "4")
    assert "ROCm" not in missing


def test_3693_no_hipblaslt_lf_line_ends_and_a_title_of_the_rows_dtype(run: Path, aiter: Path) -> None:
    tuned = run / "tuned.csv"
    foreign = line(BLOCKSCALE, M=9, libtype="hipblaslt", kernelName="Cijk_Ailk_Bljk")
    tuned.write_bytes((tuned.read_text() + foreign + "\n").replace("\n", "\r\n").encode())
    found = publish(run, aiter)
    assert "Cijk" not in show(aiter, BRANCH, FILE)
    assert [r["key"]["M"] for r in found["rows"] if r["outcome"] == "refused"] == [9]
    assert b"\r" not in show(aiter, BRANCH, FILE).encode()
    assert found["title"] == "[Config] Tune llama a8w8_blockscale (fp8) GEMMs for gfx950"
    with pytest.raises(InputError, match="--title names fp4, and the rows are of fp8"):
        publish(run, aiter, "--title", "Add llama mxfp4 GEMM tuning", "--branch", "b2")
    assert publish(run, aiter, "--title", "Add llama FP8 tables", "--branch", "b2")["title"] == "Add llama FP8 tables"
    assert types_of(FAMILIES["a16w16"], []) == set()


def test_times_of_one_session_stand_beside_each_other(run: Path, aiter: Path) -> None:
    """The table's own figure is 6 us, of another session; in this one its kernel takes 9 us."""
    found = publish(run, aiter)
    (edited,) = [r for r in found["rows"] if r["outcome"] == "edited"]
    assert (edited["key"]["M"], edited["before_us"], edited["after_us"], edited["paired"]) == (2, 9.0, 7.5, True)
    assert (
        "| 2x64x128 | 9.00 ± 1.0 % | 7.50 ± 1.0 % | 1.200x | pair | edited: faster by 16.7% in the same profile |"
        in (found["body"])
    )
    assert (
        "a8w8_blockscale: of 3 shapes of llama, 2 had no row (exact or padded M) before, and 0 have none after."
        in (found["body"])
    )


@pytest.mark.parametrize(
    ("output", "code", "failing", "why"),
    [
        ("test_a (x) ... ok\n\nRan 1 test in 0.1s\n\nOK\n", 0, set(), ""),
        ("FAIL: test_a (x.T.test_a)\nRan 2 tests in 0.1s\nFAILED (failures=1)\n", 1, {"test_a (x.T.test_a)"}, ""),
        ("ERROR: test_a (x)\nRan 2 tests in 0.1s\nFAILED (errors=1, skipped=1)\n", 1, {"test_a (x)"}, ""),
        ("a ... skipped 'no torch'\nRan 1 test in 0s\nOK (skipped=1)\n", 0, set(), "it skips itself: no torch"),
        ("ModuleNotFoundError: No module named 'pandas'\n", 1, set(), "it did not run: ModuleNotFoundError: No module"),
        ("", 3, set(), "it did not run: exit code 3"),
        ("Ran 1 test in 0.1s\n", 2, {"exit code 2"}, ""),
    ],
)
def test_outputs_of_unittest(output: str, code: int, failing: set[str], why: str) -> None:
    found = read_output(output, code)
    assert set(found.failing) == failing
    assert found.why.startswith(why)
    assert bool(found.why) == bool(why)


def test_run_config_on_nodes_is_read_from_verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, log = tmp_path / BLOCKSCALE.tuned_csv, tmp_path / "checks" / "x.log"
    table.write_text(text(BLOCKSCALE, line(BLOCKSCALE, M=1, libtype="cktile", kernelName=TILE)))
    held, says = run_verify(["-i", str(tmp_path / "none.yaml")], table, log)
    assert not held
    assert says.startswith("not run: error: ")
    assert "none.yaml" in says
    assert "none.yaml" in log.read_text()
    rows = [{"selected": True, "verdict": "ok"}, {"selected": False, "verdict": "ok"}]
    nodes = [{"node": "n1", "why": "", "rows": rows}, {"node": "n2", "why": "no GPU", "rows": rows}]
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho what AITER prints >&2\necho '{json.dumps({'nodes': nodes})}'\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert run_verify([], table, log) == (False, "n1: 1 of 2 rows used and right; n2: no GPU")
    assert log.read_text() == "what AITER prints\n"
