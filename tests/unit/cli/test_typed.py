"""Commands that are suggested: as they can be typed, and what is useful once a run has ended."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.cli.ending import next_lines, next_steps
from orchestrator.command_hints import called, command, program
from orchestrator.paths import RunConfig, RunPaths
from tests.paths import ROOT

PATHS = RunPaths(Path("runs/20260131-154500-3f9a"))
CONFIG = RunConfig(PATHS.run, 0.0, [], "0", "a4w4_blockscale", "aiter", "s.csv", "", "inv.yaml")


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """A .venv with our script beside its python."""
    bin_ = tmp_path / "project" / ".venv" / "bin"
    bin_.mkdir(parents=True)
    for name in ("python", "gemmfleet"):
        (bin_ / name).write_text("#!/bin/sh\n")
        (bin_ / name).chmod(0o755)
    return bin_


def test_the_program_is_named_as_it_can_be_typed_from_here(venv: Path, tmp_path: Path) -> None:
    ours, here = str(venv / "python"), venv.parents[1]
    other = tmp_path / "other" / "gemmfleet"
    other.parent.mkdir()
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    for path, cwd, expected in (
        (f"/usr/bin:{venv}", here, "gemmfleet"),
        ("/usr/bin", here, ".venv/bin/gemmfleet"),
        (str(other.parent), here, ".venv/bin/gemmfleet"),  # another gemmfleet on the path is not ours
        ("/usr/bin", Path("/"), str(venv / "gemmfleet").lstrip("/")),
        ("/usr/bin", venv / "x", str(venv / "gemmfleet")),
    ):
        assert called(ours, path, cwd) == expected
    assert called(ours, "/usr/bin", venv.parents[2]) == "project/.venv/bin/gemmfleet"
    blanks = tmp_path / "my env"
    blanks.mkdir()
    (blanks / "gemmfleet").write_text("")
    assert called(str(blanks / "python"), "", tmp_path) == "'my env/gemmfleet'"
    (venv / "gemmfleet").unlink()
    assert called(ours, "/usr/bin", here) == ".venv/bin/python -m orchestrator"


def test_no_message_spells_the_program_by_hand() -> None:
    """In the controller's code a suggested command comes from `command`, for only that can be typed everywhere."""
    by_hand = re.compile(r"[:(`] ?gemmfleet [a-z]+")
    found = [
        f"{path.relative_to(ROOT)}:{n}: {line.strip()}"
        for path in sorted((ROOT / "orchestrator").rglob("*.py"))
        for n, line in enumerate(path.read_text().splitlines(), 1)
        if by_hand.search(line) and not line.startswith(('"""', "`"))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("config", "how", "words"),
    [
        (CONFIG, {}, [f"db merge {PATHS.root} --into a4w4_blockscale_tuned_gemm.csv", f"report {PATHS.run}",
                      f"verify {PATHS.run}", f"db export {PATHS.tuned} --env"]),
        (replace(CONFIG, db="my tables/t.csv"), {}, [f"report {PATHS.run}", f"verify {PATHS.run}",
                                                     "db export 'my tables/t.csv' --env"]),
        # tables of our own tuners are not for AITER
        (replace(CONFIG, tuner="torch"), {}, [f"db merge {PATHS.root} --into a4w4_blockscale-torch.csv",
                                              f"report {PATHS.run}"]),
        (CONFIG, {"unsettled": True}, [f"resume {PATHS.run}"]),
    ],
)  # fmt: skip
def test_next_steps_once_a_run_has_ended(config: RunConfig, how: dict[str, bool], words: list[str]) -> None:
    steps = next_steps(PATHS, config, **{"tuned": 3, "failed": 0, "unsettled": False, **how})  # type: ignore[arg-type]
    assert [w for w, _ in steps] == words


def test_failures_come_first() -> None:
    for tuned in (3, 0):
        steps = next_steps(PATHS, CONFIG, tuned=tuned, failed=1, unsettled=False)
        assert [w.split()[0] for w, _ in steps][:2] == ["explain", "retry"]
    assert next_lines([("report r", "the page"), ("status run", "how it stands")]) == [
        f"next: {program()} report r    # the page", f"      {command('status run')}  # how it stands",
    ]  # fmt: skip


def test_a_run_elsewhere_is_named_with_its_folder() -> None:
    assert RunPaths(Path("/my runs/r1")).named == "r1 --runs '/my runs'"
    assert PATHS.named == PATHS.run
