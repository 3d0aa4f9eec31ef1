"""Tests are found by the name of what they test."""

from __future__ import annotations

from pathlib import Path

from tests.paths import ROOT

UNIT = ROOT / "tests" / "unit"
OF_SEVERAL_MODULES = {
    "cli/test_command_line", "cli/test_relative_paths",
    "configs/test_engines", "configs/test_resolve",
    "controller/test_by_value", "controller/test_render",
    "engine/test_engines",
    "leases/test_leased_run",
    "policy/test_fleet_sim", "policy/test_laws", "policy/test_laws_leases", "policy/test_noisy", "policy/test_replay",
    "policy/test_simulated",
    "view/test_recorded",
    "worker/agent/test_canary",
}  # fmt: skip
"""Files of tests that are about what several modules do together."""


def modules_of(room: Path) -> set[str]:
    """Names of the modules and packages that a folder of tests is about, its own included."""
    folders = [ROOT / "orchestrator" / room, ROOT / room]
    if room.parts[:1] == ("worker",):
        folders.append(ROOT / "worker" / "tuners" / room.relative_to("worker"))
    return {room.name, *(p.stem for f in folders for p in f.glob("[a-z]*"))}


def test_a_file_of_tests_has_the_name_of_a_module() -> None:
    """`test_check_build.py` is about the module `check`; tests of the project itself have no module."""
    lost = []
    for file in UNIT.rglob("test_*.py"):
        of, name = file.parent.relative_to(UNIT), file.stem.removeprefix("test_")
        if of.name != "project" and not any(f"{name}_".startswith(f"{m}_") for m in modules_of(of)):
            lost.append(str(of / file.stem))
    assert set(lost) <= OF_SEVERAL_MODULES
