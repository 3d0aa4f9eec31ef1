"""Files and report of a bench, from the rows of a ledger; the order of `--env` decides which side is golden."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.cli.ending import add_results, end_page, missing_results
from orchestrator.cli.printer import Page
from orchestrator.errors import InputError
from orchestrator.families import get_family
from orchestrator.paths import RunConfig, RunPaths
from orchestrator.results.bench import BenchResults, Result, compared, long
from tests.support.ledger_kit import A8W8, DEVICE, Run
from tests.support.ledger_kit import row as row_record
from worker.protocol import record as worker_record

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
    config = "gemm/x.json any 16x64x128"
    found = [result("torch", 20.0, env="tot", aiter_config=config)]
    made = rows(long([*found, result("aiter", 0.0, env="tot", detail="=HYPERLINK(1)")], FP4))
    assert [(r["backend"], r["run"]) for r in made] == [("torch", 1), ("torch", 2), ("torch", 3), ("aiter", 0)]
    assert made[3]["detail"] == "'=HYPERLINK(1)"
    side = rows(compared(found, FP4, "tot"))
    assert [tuple(r.values())[-3:] for r in side] == [(f"{us:.4f}", i, config) for i, us in found[0].runs]
    assert {(r["kernel"], r["M"]) for r in side} == {("torch/mm", 16)}
    assert "aiter_config" not in rows(compared([result("torch", 20.0, env="a")], FP4, "a"))[0]


def test_a_fault_or_a_wrong_result_is_a_failure_and_absence_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    ok, absent = result("torch", 20.0), result("aiter", 0.0, detail="no module aiter")
    of = BenchResults(RunPaths(Path()), FP4, [ok, absent], {}, 1)
    assert [of.at_fault, replace(of, found=[ok, result("triton", 0.0, status="wrong")]).at_fault] == [False, True]
    (told,) = missing_results([ok, absent, result("aiter", 0.0, shape=2, detail="no module aiter")])
    assert (told["backend"], told["status"], told["shapes"]) == ("aiter", "unavailable", 2)
    add_results(page := Page(), [ok, absent, result("triton", 30.0)])
    page.print()
    heads, line, caption = (" ".join(text.split()) for text in capsys.readouterr().out.splitlines())
    assert (heads, line[-5:], caption) == ("shape torch aiter triton fastest", "torch", "TFLOPS")
    assert " - " in line


def test_the_compare_line_and_the_records_have_the_order_of_env(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = RunPaths(tmp_path / "r1")
    paths.root.mkdir()
    options: dict[str, Any] = {"backends": ["torch"], "sides": [{"name": name} for name in ("golden", "tot")]}
    RunConfig("r1", 0.0, [], "0", A8W8.name, "bench", "s.csv", "", "i.yaml", options=options).write(paths.config)
    device = {**DEVICE, "bench": {"tot": {"torch": "2.9"}, "golden": {"torch": "2.8"}}}
    with Run(paths.root, ((1, 2),)) as run:
        with run.ledger.transaction():
            run.ledger.set_meta("tuner", "bench")
        run.send("g0001-1", slot="0")
        run.says(worker_record("attempt_started", 1.0, attempt="g0001-1", group="", device=device))
        # the first number to arrive is of tot
        for shape, env, us in ((1, "tot", 202.7), (1, "golden", 100.0), (2, "tot", 405.4)):
            for number in (1, 2, 3):
                more = {"env": env, "run": number, "op": "mm", "libtype": "torch"}
                run.says(row_record("row", "g0001-1", shape, us=us * (1 + number / 1000), **more))
        BenchResults.of_run(run.ledger, paths, options).write()
    end_page(paths, "finished").finish()
    (line,) = [text for text in capsys.readouterr().out.splitlines() if text.startswith("next:")]
    words = shlex.split(line)
    sides = words[words.index("compare") + 1 :]
    assert [Path(side).stem for side in sides] == ["golden", "tot"]
    assert [json.loads((paths.root / f"{n}.env.json").read_text())["side"] for n in ("golden", "tot")] == [1, 2]
    typed = CliRunner().invoke(app, ["compare", *sides])
    assert (typed.exit_code, "+102.7 %" in typed.stdout) == (1, True)
    swapped = CliRunner().invoke(app, ["compare", *reversed(sides)])
    assert isinstance(swapped.exception, InputError)
    assert "in the bench r1 the golden side here (tot) was --env number 2" in str(swapped.exception)
