"""Commands that are suggested: as they can be typed, and what is useful once a run has ended."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.cli.output.run_end import next_steps, print_next
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


class TestProgram:
    def test_on_the_path_it_is_its_name(self, venv: Path) -> None:
        assert called(str(venv / "python"), f"/usr/bin:{venv}", venv.parents[1]) == "gemmfleet"

    def test_else_it_is_the_way_from_here(self, venv: Path) -> None:
        assert called(str(venv / "python"), "/usr/bin", venv.parents[1]) == ".venv/bin/gemmfleet"

    def test_from_elsewhere_it_is_the_whole_way(self, venv: Path) -> None:
        assert called(str(venv / "python"), "/usr/bin", Path("/")) == str(venv / "gemmfleet").lstrip("/")
        assert called(str(venv / "python"), "/usr/bin", venv / "x") == str(venv / "gemmfleet")

    def test_another_gemmfleet_on_the_path_is_not_ours(self, venv: Path, tmp_path: Path) -> None:
        other = tmp_path / "other" / "gemmfleet"
        other.parent.mkdir()
        other.write_text("#!/bin/sh\n")
        other.chmod(0o755)
        assert called(str(venv / "python"), str(other.parent), venv.parents[1]) == ".venv/bin/gemmfleet"

    def test_without_a_script_it_is_the_module(self, venv: Path) -> None:
        (venv / "gemmfleet").unlink()
        assert called(str(venv / "python"), "/usr/bin", venv.parents[1]) == ".venv/bin/python -m orchestrator"

    def test_a_way_with_blanks_is_quoted(self, tmp_path: Path) -> None:
        bin_ = tmp_path / "my env"
        bin_.mkdir()
        (bin_ / "gemmfleet").write_text("")
        assert called(str(bin_ / "python"), "", tmp_path) == "'my env/gemmfleet'"


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


class TestNextSteps:
    def words(self, config: RunConfig, **how: int | bool) -> list[str]:
        given = {"tuned": 3, "failed": 0, "unsettled": False, **how}
        return [w for w, _ in next_steps(PATHS, config, **given)]  # type: ignore[arg-type]

    def test_success_offers_merge_report_verify_and_export(self) -> None:
        assert self.words(CONFIG) == [
            f"db merge {PATHS.root} --into a4w4_blockscale_tuned_gemm.csv",
            f"report {PATHS.run}",
            f"verify {PATHS.run}",
            f"db export {PATHS.tuned} --env",
        ]

    def test_what_is_merged_already_is_not_merged_again(self) -> None:
        words = self.words(replace(CONFIG, db="my tables/t.csv"))
        assert words[0] == f"report {PATHS.run}"
        assert words[-1] == "db export 'my tables/t.csv' --env"

    def test_tables_of_our_own_tuners_are_not_for_aiter(self) -> None:
        words = self.words(replace(CONFIG, tuner="torch"))
        assert [w.split()[0] for w in words] == ["db", "report"]
        assert words[0].endswith("--into a4w4_blockscale-torch.csv")

    def test_failures_come_first(self) -> None:
        assert [w.split()[0] for w in self.words(CONFIG, failed=1)][:2] == ["explain", "retry"]
        assert [w.split()[0] for w in self.words(CONFIG, failed=1, tuned=0)] == ["explain", "retry"]

    def test_an_unfinished_run_is_resumed(self) -> None:
        assert self.words(CONFIG, unsettled=True) == [f"resume {PATHS.run}"]

    def test_they_are_printed_as_typed(self, capsys: pytest.CaptureFixture[str]) -> None:
        print_next([("report r", "the page"), ("status run", "how it stands")])
        assert capsys.readouterr().out.splitlines() == [
            f"next: {program()} report r    # the page",
            f"      {command('status run')}  # how it stands",
        ]


def test_a_run_elsewhere_is_named_with_its_folder() -> None:
    assert RunPaths(Path("/my runs/r1")).named == "r1 --runs '/my runs'"
    assert PATHS.named == PATHS.run
