"""The blocklist of candidates: evidence of one slot, image and driver, for a week; confirmed, refuted, expired."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.health_kit import unfold
from worker.protocol import BlocklistVerdict
from worker.tuners.aiter import blocklist
from worker.tuners.aiter.blocklist import (
    EXPIRES_S,
    Blocklist,
    BlocklistEntry,
    CandidateId,
    LeftOut,
    SlotIdentity,
    current_entries,
    driver_version,
    read_lines,
    slot_identity,
)
from worker.tuners.base import Place

HERE = SlotIdentity("0xabc", "sha256:1", "amdgpu 6.14")
NOW = 1_800_000_000.0
FIRST, SECOND = (CandidateId(("256", "1", "2", "3"), (n, "0", "")) for n in ("4", "5"))
ENTRY = BlocklistEntry(HERE, "a8w8", FIRST, "fault", "Memory access fault", True, NOW - 60.0)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocklist, "time", SimpleNamespace(time=lambda: NOW))


def of(path: Path, where: SlotIdentity = HERE, *entries: BlocklistEntry) -> Blocklist:
    made = Blocklist(path / "deep/blocklist.jsonl", where)
    for entry in entries:
        made.note(entry)
    return made


def used(path: Path, where: SlotIdentity = HERE, family: str = "a8w8") -> set[CandidateId]:
    return set(of(path, where).in_force(family))


def test_an_entry_is_used_by_its_own_slot_image_and_driver_alone(tmp_path: Path) -> None:
    of(tmp_path, HERE, ENTRY)
    assert used(tmp_path) == {FIRST}
    for other in (replace(HERE, slot="0xdef"), replace(HERE, image="sha256:2"), replace(HERE, driver="amdgpu 6.15")):
        assert used(tmp_path, other) == set()
    assert used(tmp_path, family="fmoe") == set()
    assert used(tmp_path / "none") == set()


def test_it_expires_after_a_week_unless_it_was_confirmed(tmp_path: Path) -> None:
    old = NOW - EXPIRES_S - 1.0
    of(tmp_path, HERE, replace(ENTRY, t=old), replace(ENTRY, candidate=SECOND, t=old, confirmed=True))
    assert used(tmp_path) == {SECOND}
    assert used(tmp_path, replace(HERE, slot="other")) == {SECOND}, "all slots of image and driver"
    assert used(tmp_path, replace(HERE, slot="other", driver="x")) == set()


def test_only_what_a_healthy_slot_saw_is_used(tmp_path: Path) -> None:
    of(tmp_path, HERE, replace(ENTRY, canary=False))
    assert used(tmp_path) == set()
    of(tmp_path, HERE, ENTRY, replace(ENTRY, canary=False, t=NOW))
    assert used(tmp_path) == {FIRST}, "a later fault in a group takes nothing back"


def test_words_of_the_controller(tmp_path: Path) -> None:
    made = of(tmp_path, HERE, ENTRY, replace(ENTRY, candidate=SECOND), replace(ENTRY, where=replace(HERE, slot="o")))
    first = BlocklistVerdict(family="a8w8", key=list(FIRST.key), candidate=list(FIRST.ident))
    second = BlocklistVerdict(family="a8w8", key=list(SECOND.key), candidate=list(SECOND.ident), slot=HERE.slot, t=1.0)
    made.judge([first], [second])
    assert used(tmp_path) == {SECOND}
    assert used(tmp_path, replace(HERE, slot="o")) == {FIRST, SECOND}, "another slot's own entry stands"
    made.note(replace(ENTRY, t=NOW))
    assert used(tmp_path) == {FIRST, SECOND}, "it faulted again after it was taken back"
    made.note(replace(ENTRY, candidate=SECOND, t=NOW))
    assert used(tmp_path, replace(HERE, slot="o")) == {FIRST, SECOND}, "once confirmed, a new entry does not undo it"


def test_broken_lines_and_those_of_0_1_0_are_passed_over(tmp_path: Path) -> None:
    made = of(tmp_path, HERE, ENTRY)
    path = tmp_path / "deep/blocklist.jsonl"
    older = {"t": NOW, "image": "sha256:1", "gfx": "gfx950", "family": "a8w8", **SECOND.as_json(), "named": "",
             "outcome": "fault", "detail": "x", "canary": True}  # fmt: skip
    with path.open("a") as f:
        f.write('7\n{"family": "a8w8", "key": 3, "candidate": []}\n' + json.dumps(older) + '\n{"family": "a8w8", "can')
    assert set(made.in_force("a8w8")) == {FIRST}
    assert len(current_entries(read_lines(path))) == 2


def test_what_the_record_and_the_row_say(tmp_path: Path) -> None:
    left_out = LeftOut({SECOND: replace(ENTRY, candidate=SECOND)}).and_(ENTRY, "folder")
    before, now = left_out.withheld(SECOND), left_out.withheld(FIRST)
    assert before is not None
    assert now is not None
    assert (before["source"], now["source"]) == ("blocklist", "attempt")
    assert (now["candidate"], now["key"], now["slot"]) == (["4", "0", ""], ["256", "1", "2", "3"], "0xabc")
    assert left_out.why(SECOND) == "left out: fault on this slot with this image before (Memory access fault)"
    assert left_out.why(FIRST).startswith("fault: Memory access fault; to see it again: folder")


def test_where_a_slot_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMMFLEET_HEALTH_ROOT", str(tmp_path))
    assert slot_identity(Place(None, "n1", "3"), "sha256:1").slot == "n1/3", "no GPU has an id here"
    unfold("mi355x", tmp_path)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0")
    found = slot_identity(Place(None, "n1", "0"), "sha256:1").slot
    assert found
    assert "/" not in found


def test_the_driver_is_named_by_its_version_or_the_kernels(tmp_path: Path) -> None:
    assert driver_version(tmp_path) == ""
    (tmp_path / "sys/module/amdgpu").mkdir(parents=True)
    assert driver_version(tmp_path).startswith("amdgpu of Linux ")
    (tmp_path / "sys/module/amdgpu/version").write_text("6.14.5\n")
    assert driver_version(tmp_path) == "amdgpu 6.14.5"
