"""Files and report of a bench, from the rows of a ledger; the order of `--env` decides which side is golden."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.cli.ending import end_page
from orchestrator.errors import InputError
from orchestrator.families import get_family
from orchestrator.paths import RunConfig, RunPaths
from orchestrator.results.bench import BenchResults, Result, long
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


def test_every_run_is_a_row_of_the_long_file() -> None:
    made = rows(long([result("torch", 20.0, env="tot"), result("aiter", 0.0, env="tot", detail="=HYPERLINK(1)")], FP4))
    assert [(r["backend"], r["run"]) for r in made] == [("torch", 1), ("torch", 2), ("torch", 3), ("aiter", 0)]
    assert made[3]["detail"] == "'=HYPERLINK(1)"


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
