"""The sides of a bench of two stacks: the order of `--env` decides which one is golden, not the order of arrival."""

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
from orchestrator.paths import RunConfig, RunPaths
from orchestrator.results.bench import BenchResults
from tests.support.ledger_kit import A8W8, DEVICE, Run, row
from worker.protocol import record


def test_the_compare_line_and_the_records_have_the_order_of_env(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = RunPaths(tmp_path / "r1")
    paths.root.mkdir()
    options: dict[str, Any] = {"backends": ["torch"], "sides": [{"name": name} for name in ("golden", "tot")]}
    RunConfig("r1", 0.0, [], "0", A8W8.name, "bench", "s.csv", "", "i.yaml", options=options).write(paths.config)
    device = {**DEVICE, "bench": {"tot": {"torch": "2.9"}, "golden": {"torch": "2.8"}}}
    times = {1: {"tot": 202.7, "golden": 100.0}, 2: {"tot": 405.4}}  # the first number to arrive is of tot
    with Run(paths.root, ((1, 2),)) as run:
        with run.ledger.transaction():
            run.ledger.set_meta("tuner", "bench")
        run.send("g0001-1", slot="0")
        run.says(record("attempt_started", 1.0, attempt="g0001-1", group="", device=device))
        for shape, of in times.items():
            for env, us in of.items():
                for number in (1, 2, 3):
                    more = {"env": env, "run": number, "op": "mm", "libtype": "torch"}
                    run.says(row("row", "g0001-1", shape, us=us * (1 + number / 1000), **more))
        BenchResults.of_run(run.ledger, paths, options).write()
    end_page(paths, "finished").finish()
    (line,) = [text for text in capsys.readouterr().out.splitlines() if text.startswith("next:")]
    words = shlex.split(line)
    sides = words[words.index("compare") + 1 :]
    assert [Path(side).stem for side in sides] == ["golden", "tot"]
    records = [json.loads((paths.root / f"{name}.env.json").read_text()) for name in ("golden", "tot")]
    assert [r["side"] for r in records] == [1, 2]
    typed = CliRunner().invoke(app, ["compare", *sides])
    assert (typed.exit_code, "+102.7 %" in typed.stdout) == (1, True)
    swapped = CliRunner().invoke(app, ["compare", *reversed(sides)])
    assert isinstance(swapped.exception, InputError)
    assert "the sides are swapped: in the bench r1 the golden side here (tot) was --env number 2" in str(
        swapped.exception
    )
