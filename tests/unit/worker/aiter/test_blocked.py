"""Blocked candidates: evidence of one slot, image and driver, for a week, or confirmed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from worker.tuners.aiter import blocked
from worker.tuners.aiter.blocked import (
    EXPIRES_S,
    BlockedCandidates,
    BlockedEntry,
    CandidateId,
    SlotIdentity,
)

HERE = SlotIdentity("0xabc", "sha256:1", "amdgpu 6.14")
ELSEWHERE = replace(HERE, slot="other")
NOW = 1_800_000_000.0
FIRST, SECOND = (CandidateId(("256", "1", "2", "3"), (n, "0", "")) for n in ("4", "5"))
ENTRY = BlockedEntry(HERE, "a8w8", FIRST, "fault", "Memory access fault", NOW - 60.0)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "time", SimpleNamespace(time=lambda: NOW))


def of(path: Path, *entries: BlockedEntry) -> BlockedCandidates:
    made = BlockedCandidates(path / "deep/blocklist.jsonl", HERE)
    for entry in entries:
        made.append(entry.as_json())
    return made


def used(path: Path, where: SlotIdentity = HERE, family: str = "a8w8") -> set[CandidateId]:
    return set(BlockedCandidates(path / "deep/blocklist.jsonl", where).in_force(family))


def test_an_entry_is_used_by_its_own_slot_image_and_driver_for_a_week_unless_confirmed(tmp_path: Path) -> None:
    assert used(tmp_path) == set()
    made = of(tmp_path, ENTRY, replace(ENTRY, candidate=SECOND, t=NOW - EXPIRES_S - 1.0))
    with (tmp_path / "deep/blocklist.jsonl").open("a") as f:
        f.write('7\n{"family": "a8w8", "key": 3, "candidate": []}\n{"family": "a8w8", "can\n')
    assert used(tmp_path) == {FIRST}
    for other in (ELSEWHERE, replace(HERE, image="sha256:2"), replace(HERE, driver="amdgpu 6.15")):
        assert used(tmp_path, other) == set()
    assert used(tmp_path, family="fmoe") == set()
    made.append(replace(ENTRY, candidate=SECOND, t=NOW - EXPIRES_S - 1.0, confirmed=True).as_json())
    assert used(tmp_path, ELSEWHERE) == {SECOND}, "all slots of image and driver"
    assert used(tmp_path, replace(ELSEWHERE, driver="x")) == set()
