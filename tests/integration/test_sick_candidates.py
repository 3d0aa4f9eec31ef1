"""A GPU on which some kernels fault while its canary passes: two nodes, real workers, candidates that really die."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator import events as ev
from tests.integration.fleetkit import journal
from tests.integration.kit import Bench, Done, read_csv
from worker.protocol.blocklist import current_entries, read_lines

CK = [("ck_a", 6.82), ("ck_b", 7.4)]
ASM = [("asm_a", 5.91), ("asm_b", 6.1), ("asm_c", 6.3)]


class Two(Bench):
    """Two nodes `sick` and `well` with a slot each, and recorded rows: ASM wins everywhere."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.recording = self.root / "recording.csv"
        self.write_nodes("sick", "well")

    def write_nodes(self, *names: str, slots: int = 1) -> None:
        nodes = "".join(
            f"  {n}:\n    gpus: {list(range(i * slots, (i + 1) * slots))}\n    workdir: {self.workdir / n}\n"
            for i, n in enumerate(names)
        )
        self.inventory.write_text("defaults: {family: a16w16, tuner: replay}\nnodes:\n" + nodes)

    def record(self, shapes: int, per_group: int = 1) -> None:
        self.shapes(shapes, per_group)
        keys = [tuple(r.values()) for r in read_csv(self.shapes_csv)]
        with open(self.recording, "w", newline="") as f:
            out = csv.writer(f)
            out.writerow(
                ["M", "N", "K", "kernelId", "splitK", "us", "kernelName", "libtype", "errRatio", "gfx", "cu_num"]
            )
            for m, n, k in keys:
                for i, (name, us) in enumerate([*CK, *ASM]):
                    out.writerow([m, n, k, i, 0, us, name, name.split("_")[0], 0.0, "gfx950", 256])

    def play(self, *faults: dict[str, Any], seconds: float = 0.0, more: tuple[str, ...] = ()) -> Done:
        lists = self.root / "blocklists"
        lists.mkdir(exist_ok=True)
        told = ["-O", f"recording={self.recording}", "-O", f"blocklist={lists / 'all.jsonl'}", "--tuner", "faulty"]
        return self.tune(faults=faults, seconds=seconds, more=[*told, *more])

    def listed(self) -> int:
        """Candidates that the blocklist leaves out."""
        return len(current_entries(read_lines(self.root / "blocklists" / "all.jsonl")))

    def kernels(self) -> set[str]:
        return {r["kernelName"] for r in read_csv(self.paths.tuned)}

    def charges(self) -> dict[tuple[str, str], int]:
        """(node, slot) -> candidates that are held against it."""
        out: dict[tuple[str, str], int] = {}
        for _, c in journal(self, ev.ChargeSlot):
            out[c.node, c.slot] = out.get((c.node, c.slot), 0) + len(c.candidates)
        return out


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    made = Two(tmp_path)
    yield made
    made.close()


def asm_faults_on(node: str, **more: Any) -> dict[str, Any]:
    return {"kind": "abort", "match": {"node": node, "libtype": "asm"}, **more}


def test_the_winner_is_not_what_a_sick_slot_left_over(two: Two) -> None:
    """The story: single-shape groups are salvaged on the sick slot, which has CK at 6.82 us."""
    two.record(6)
    done = two.play(asm_faults_on("sick"), seconds=0.3)
    assert done.code == 0, done.out + done.err
    two.check_books(tuned=6, failed={})
    assert two.kernels() == {"asm_a"}
    assert set(two.charges()) == {("sick", "0")}
    assert "unconfirmed" not in done.out
    provenance = json.loads(two.paths.provenance.read_text())
    assert provenance["unconfirmed"] == []
    assert {w["elsewhere"] for w in provenance["withheld"]} == {"ran"}
    assert {w["node"] for w in provenance["withheld"]} == {"sick"}
    charged = journal(two, ev.ChargeSlot)[0][1]
    assert "ran on well slot 1" in two.run("explain", str(charged.shape)).out


@pytest.mark.full
def test_a_slot_that_loses_three_candidates_of_two_shapes_is_quarantined(two: Two) -> None:
    two.record(12)
    done = two.play(asm_faults_on("sick"), seconds=0.4)
    assert done.code == 0, done.out + done.err
    assert {(q.node, q.slot) for _, q in journal(two, ev.Quarantine)} == {("sick", "0")}
    assert "ran elsewhere" in next(q.why for _, q in journal(two, ev.Quarantine))
    assert two.kernels() == {"asm_a"}


@pytest.mark.full
def test_after_the_fault_is_gone_nothing_stays_withheld_and_nobody_is_charged(two: Two) -> None:
    """A verdict goes with the next spec of its node: the last one of a run waits for the next run."""
    two.record(6)
    two.play(asm_faults_on("sick"), seconds=0.3)
    assert two.charges()
    left = two.listed()
    for _ in range(6):
        done = two.play(seconds=0.3)
        assert done.code == 0, done.out + done.err
        assert two.kernels() == {"asm_a"}
        assert sum(two.charges().values()) == 0  # what faulted before this run says nothing of today
        assert journal(two, ev.Quarantine) == []
        assert two.listed() <= left
        left = two.listed()
        if not left:
            break
    assert left == 0


@pytest.mark.full
def test_where_every_candidate_faults_the_other_node_makes_the_attempt(two: Two) -> None:
    two.record(4)
    done = two.play({"kind": "abort", "match": {"node": "sick", "libtype": ["asm", "ck"]}}, seconds=0.3)
    assert done.code == 0, done.out + done.err
    two.check_books(tuned=4, failed={})
    assert two.kernels() == {"asm_a"}


@pytest.mark.full
def test_a_group_s_fault_leads_to_one_shape_alone_and_then_to_a_second_slot(two: Two) -> None:
    two.record(2, per_group=3)
    done = two.play(asm_faults_on("sick"), seconds=0.3)
    assert done.code == 0, done.out + done.err
    two.check_books(tuned=6, failed={})
    assert two.kernels() == {"asm_a"}


@pytest.mark.full
def test_a_candidate_that_faults_everywhere_is_left_out_and_confirmed(two: Two) -> None:
    two.record(3)
    done = two.play({"kind": "abort", "match": {"kernelName": "asm_a"}}, seconds=0.2)
    assert done.code == 0, done.out + done.err
    two.check_books(tuned=3, failed={})
    assert two.kernels() == {"asm_b"}
    assert two.charges() == {}
    assert "unconfirmed" not in done.out
    assert len(journal(two, ev.ConvictCandidates)) == 3
    lines = (two.root / "blocklists" / "all.jsonl").read_text()
    assert "asm_a" in lines


@pytest.mark.full
def test_with_one_slot_the_shape_is_unconfirmed_everywhere(two: Two) -> None:
    two.write_nodes("sick")
    two.record(2)
    done = two.play(asm_faults_on("sick"))
    assert done.code == 0, done.out + done.err
    two.check_books(tuned=2, failed={})
    assert two.kernels() == {"ck_a"}
    assert "2 shapes unconfirmed" in done.out
    assert "unconfirmed" in two.run("explain", "1").out
    profile = read_csv(two.paths.root / "profile.csv")
    assert {(r["winner"], r["unconfirmed"]) for r in profile} == {("0", "0"), ("1", "1")}
    assert "unconfirmed" not in two.paths.tuned.read_text()
    provenance = json.loads(two.paths.provenance.read_text())
    assert {w["name"].split()[-1] for u in provenance["unconfirmed"] for w in u["withheld"]} == {n for n, _ in ASM}
    two.run("report", "-o", str(two.root / "page.html"))
    assert "of them unconfirmed" in (two.root / "page.html").read_text()


@pytest.mark.full
def test_a_second_slot_of_the_node_will_do(two: Two) -> None:
    two.write_nodes("sick", slots=2)
    two.record(3)
    done = two.play({"kind": "abort", "match": {"slot": "0", "libtype": "asm"}}, seconds=0.3)
    assert done.code == 0, done.out + done.err
    assert two.kernels() == {"asm_a"}
    assert "unconfirmed" not in done.out


@pytest.mark.full
@pytest.mark.parametrize("kind", ["kill_worker"])
def test_a_worker_that_dies_while_it_confirms_costs_nothing(two: Two, kind: str) -> None:
    two.record(1)
    attempt = {"kind": kind, "match": {"node": ["sick", "well"], "group": "g0001a"}, "times": 1, "after_rows": 1}
    both = [asm_faults_on("sick", times=3), asm_faults_on("well", times=3), attempt]
    done = two.play(*both, seconds=0.3)
    assert done.code == 0, done.out + done.err
    two.check_books(tuned=1, failed={})
    assert [a.group for a in two.ledger().attempts()].count("g0001a") >= 2
