"""Files of a bench, from the rows of a ledger; options and files that are requested."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.bench import request
from orchestrator.cli.ending import add_results, missing_results
from orchestrator.cli.printer import Page
from orchestrator.errors import InputError
from orchestrator.families import get_family
from orchestrator.ledger.reader import ProfileRow
from orchestrator.paths import RunPaths
from orchestrator.results.bench import BenchResults, Result, compared, fastest, long, redacted, results
from worker.families import BATCHED
from worker.protocol.bench import Options, Rule, backends

FP4 = get_family("a4w4_blockscale")
KEY = (16, 512, 1024)


def result(backend: str, us: float, **more: Any) -> Result:
    base: dict[str, Any] = {
        "status": "ok" if us else "unavailable", "us": us, "tflops": 2 * 16 * 512 * 1024 / us / 1e6 if us else 0.0,
        "runs": ((1, us), (2, us * 1.01), (3, us * 0.99)) if us else (), "op": "mm", "kernel": "k", "node": "n",
    }  # fmt: skip
    return Result(**{"shape": 1, "key": KEY, "env": "", "backend": backend, **base, **more})


def rows(lines: Any) -> list[dict[str, Any]]:
    header, *cells = list(lines)
    assert len(set(header)) == len(header)
    return [dict(zip(header, c, strict=True)) for c in cells]


def test_every_run_is_a_row_of_the_long_file_and_of_its_side() -> None:
    found = [result("torch", 20.0, env="tot"), result("aiter", 0.0, env="tot", detail="=HYPERLINK(1)")]
    made = rows(long(found, FP4))
    assert [(r["backend"], r["run"]) for r in made] == [("torch", 1), ("torch", 2), ("torch", 3), ("aiter", 0)]
    assert made[3]["detail"] == "'=HYPERLINK(1)"
    side = rows(compared(found, FP4, "tot"))
    assert [(r["kernel"], r["M"], r["run"]) for r in side] == [("torch/mm", 16, i) for i in (1, 2, 3)]


def test_a_fault_or_a_wrong_result_is_a_failure_and_absence_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    ok, absent = result("torch", 20.0), result("aiter", 0.0, detail="no module aiter")
    of = BenchResults(RunPaths(Path()), FP4, [ok, absent], {}, 1)
    assert not of.at_fault
    assert replace(of, found=[ok, result("triton", 0.0, status="wrong")]).at_fault
    (told,) = missing_results([ok, absent, result("aiter", 0.0, shape=2, detail="no module aiter")])
    assert (told["backend"], told["status"], told["shapes"]) == ("aiter", "unavailable", 2)
    assert fastest([ok, result("triton", 30.0)])[1, ""].backend == "torch"
    add_results(page := Page(), [ok, absent])
    page.print()
    heads, line, caption = (" ".join(text.split()) for text in capsys.readouterr().out.splitlines())
    assert (heads, line[-5:], caption) == ("shape torch aiter fastest", "torch", "TFLOPS")
    assert " - " in line


def row(run: int, **more: Any) -> ProfileRow:
    """A row of a pass, in a ledger of its own."""
    base = {
        "libtype": "torch",
        "kernelName": "k",
        "status": "ok",
        "errRatio": 0.0,
        "detail": "",
        "env": "a",
        "run": run,
    }
    return ProfileRow(1, "g1-1", 1, KEY, "n", "0", 0.0, False, "", None, None, {**base, **more})


def test_passes_are_one_result_whose_runs_have_to_agree() -> None:
    flops = 2 * 16 * 512 * 1024
    passes = [row(i, us=us, tflops=flops / us / 1e6) for i, us in ((1, 100.0), (2, 103.0), (3, 98.0))]
    (one,) = results(passes, Rule())
    assert (one.status, one.samples, one.runs) == ("ok", 3, ((1, 100.0), (2, 103.0), (3, 98.0)))
    assert one.us == pytest.approx(301 / 3)
    assert one.tflops == pytest.approx(flops / one.us / 1e6)
    (bad,) = results([*passes, row(4, us=-1.0, status="fault")], Rule())
    assert bad.status == "fault"


def test_backends_by_name_and_alias() -> None:
    assert backends("gluon,torch,torch") == ("aiter-gluon", "torch")
    assert backends(["aiter-batched"]) == BATCHED
    for unknown in ("triton", "own-triton"):
        with pytest.raises(ValueError, match=rf"'{unknown}' is no backend \(there are torch, aiter, aiter-triton"):
            backends(unknown)
    with pytest.raises(ValueError, match="no backend"):
        backends([])
    with pytest.raises(ValueError, match=r"unknown option 'pace'.*; runs is 0, not a whole number from 1 to 20"):
        Options.parse({"pace": 1, "runs": 0})


def test_a_table_is_sent_whole_and_recorded_by_its_hash(tmp_path: Path) -> None:
    path = tmp_path / "tuned.csv"
    path.write_text("gfx,cu_num,M,N,K,us,kernelName\ngfx950,256,16,512,1024,5.0,one\n")
    made = request.options([], ["torch"], path)
    assert made["table"] == path.read_text()
    assert redacted(made)["table"].startswith("sha256 ")
    path.write_text("M,N\n1,2\n")
    with pytest.raises(InputError, match=r"tuned\.csv:1: no column K, us"):
        request.options([], ["torch"], path)


def test_a_checkout_gives_its_gluon_files(tmp_path: Path) -> None:
    for rel in (
        "gluon/gemm_afp4wfp4.py",
        "gluon/triton_version.py",
        "configs/gfx950/gluon/gemm/x/DEFAULT.json",
        "a.py",
    ):
        path = tmp_path / "aiter/ops/triton" / rel
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {rel}")
    found = request.gluon_files(tmp_path)
    assert len(found) == 3
    assert all("gluon" in rel for rel in found)
    with pytest.raises(InputError, match="neither"):
        request.gluon_files(tmp_path / "aiter")


def test_a_bench_without_a_file_takes_the_guides_fifteen_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from orchestrator.cli.app import app

    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["bench", "--plan", "--json"])
    assert done.exit_code == 0, (done.output, done.exception)
    assert "the FP4 guide's 15 shapes" in done.stderr
    assert json.loads(done.stdout)["asked"] == 15
