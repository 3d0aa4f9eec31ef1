"""Statements of `selftest` without a node: the time is over, a check breaks, readings of GPUs, names in texts."""

from __future__ import annotations

import json
import signal
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from orchestrator.results import selftest
from orchestrator.results.selftest import HELD, NOT_HELD, NOT_TRIED, try_statements
from orchestrator.results.selftest_bundle import make_scrubber
from orchestrator.results.selftest_trial import NodeTrial, NotTriedError, Step
from tests.kits.fleet import command
from tests.standins.aiter import make_tree
from worker.aiter_tree.locate import NotATreeError, pick, tree_at


def trial(folder: Path, seconds: float = 0.0, node: str = "zeus") -> NodeTrial:
    """A trial that may run nothing."""
    inventory = folder / "inv.yaml"
    inventory.write_text(f"nodes:\n  {node}: {{host: zeus.corp.example, transport: ssh, user: hera}}\n")
    return NodeTrial(folder, inventory, None, seconds)


def test_nothing_is_tried_once_the_time_is_over(tmp_path: Path) -> None:
    rows = list(try_statements(trial(tmp_path)))
    assert [row["number"] for row in rows] == list(range(1, len(selftest.CHECKS) + 1))
    assert {row["outcome"] for row in rows} == {NOT_TRIED}
    assert {row["detail"] for row in rows[:-1]} == {"the node cannot be used: the time was over"}


def test_a_check_that_breaks_does_not_end_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(t: NodeTrial) -> tuple[bool, str]:
        raise KeyError("us")

    checks = ((1, "a", lambda t: (True, "x")), (2, "b", broken), (3, "c", lambda t: (False, "y")))
    monkeypatch.setattr(selftest, "CHECKS", checks)
    rows = [(row["outcome"], row["detail"]) for row in try_statements(trial(tmp_path))]
    assert rows == [(HELD, "x"), (NOT_TRIED, "KeyError: 'us'"), (NOT_HELD, "y")]


def test_ctrl_c_means_what_it_meant_before_however_the_command_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(t: NodeTrial) -> tuple[bool, str]:
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(selftest, "CHECKS", ((1, "a", ended),))
    words = ("selftest", "-i", str(trial(tmp_path).inventory), "-o", str(tmp_path / "b.tar.gz"))
    try:
        command(*words, "--runs", str(tmp_path / "runs"))
        assert signal.getsignal(signal.SIGINT) == before
    finally:
        signal.signal(signal.SIGINT, before)


class Recorded(NodeTrial):
    """A trial whose a4w4 run is made up."""

    def __init__(self, folder: Path, gpus: list[int], readings: list[tuple[int, str]], us: list[float]) -> None:
        super().__init__(folder, trial(folder).inventory, None, 0.0)
        devices = [{"device": {"gfx": "gfx950"}, "worker": {"gpus": [{}] * n}} for n in gpus]
        (folder / "provenance.json").write_text(json.dumps({"devices": devices}))
        said, passed = [[slot, {"before": {"id": id_}}, {}] for slot, id_ in readings], [[{"us": x}] for x in us]
        self._step = Answers({selftest.SLOT_REPORTS: said, selftest.CANARY_EVENTS: passed}, "", "", folder)

    def run_a4w4(self) -> Step:
        return self._step


class Answers(Step):
    """A step whose ledger is its document."""

    def query(self, sql: str) -> list[list[Any]]:
        rows: list[list[Any]] = self.document[sql]
        return rows


def check(number: int, t: NodeTrial) -> tuple[bool, str]:
    return selftest.CHECKS[number - 1][2](t)


def test_each_worker_must_have_a_gpu_of_its_own(tmp_path: Path) -> None:
    two = [(0, "a"), (0, "a"), (1, "b")]
    assert check(3, Recorded(tmp_path, [1, 1], two, []))[0]
    assert not check(3, Recorded(tmp_path, [2, 2], two, []))[0], "a worker sees both"
    assert not check(3, Recorded(tmp_path, [1, 1], [(0, "a"), (1, "a")], []))[0], "two slots share one"
    with pytest.raises(NotTriedError, match="see no GPU"):
        check(3, Recorded(tmp_path, [0, 0], two, []))


def test_canaries_must_agree(tmp_path: Path) -> None:
    assert check(4, Recorded(tmp_path, [1], [], [10.0, 12.0])) == (True, "10.0 to 12.0 us")
    assert not check(4, Recorded(tmp_path, [1], [], [10.0, 13.0]))[0]
    with pytest.raises(NotTriedError, match="cannot multiply"):
        check(4, Recorded(tmp_path, [1], [], [0.0]))


@pytest.mark.parametrize(("seconds", "first", "later"), [((12, 8), True, True), ((0.5, 0.1), False, False)])
def test_set_up_seconds_are_read_from_the_logs(
    tmp_path: Path, seconds: tuple[float, float], first: bool, later: bool
) -> None:
    (tmp_path / "logs").mkdir()
    lines = (f"[0] gemmfleet: set-up of batch {n}: {s:.1f} s" for n, s in enumerate(seconds, 1))
    (tmp_path / "logs" / "zeus.log").write_text("\n".join(lines))
    t = Recorded(tmp_path, [1], [], [])
    assert (check(17, t)[0], check(18, t)[0]) == (first, later)


def test_names_are_taken_out_of_texts(tmp_path: Path) -> None:
    t = trial(tmp_path)
    list(try_statements(t))
    scrub = make_scrubber(t)
    for text, left in (
        ("zeus.corp.example: Zeus is slow", "<host>: <host> is slow"),
        ("zeusville zeus2", "zeusville zeus2"),
        ("user=hera hera@10.0.0.1 10.0.0.1", "user=<user> <user>@<address> <address>"),
        (f"{tmp_path}/20261128-1/zeus/tuned.csv", "<run>/20261128-1/<host>/tuned.csv"),
        ("File '/opt/acme/x.py', line 3", "File '<path>', line 3"),
        ("/home/hera/v/lib/site-packages/torch/a.py", "<path>/site-packages/torch/a.py"),
        ("/dev/kfd /sys/class/kfd 3 us/call and/or 1/2", "/dev/kfd /sys/class/kfd 3 us/call and/or 1/2"),
        ("logs/zeus.log", "logs/<host>.log"),
        (f"{Path.home()}/acme/deals.csv", "<path>"),
    ):
        assert scrub(text) == left


def test_a_family_without_a_script_in_the_image_does_not_count_against_it(tmp_path: Path) -> None:
    t = Recorded(tmp_path, [1], [], [])
    tree = make_tree(tmp_path / "tree", "newest")
    with pytest.raises(NotATreeError) as lacking:
        pick([tree_at(tree.root)], family="batched_a8w8")
    for name, step in (
        ("a8w8", Step({"shapes": {"tuned": 2}}, "", "", tmp_path)),
        ("batched_a8w8", Step({}, f"exit code 3: {lacking.value}", "", tmp_path)),
    ):
        t.family_runs[name] = Future()
        t.family_runs[name].set_result(step)
    held, detail = check(15, t)
    assert held, detail
    assert "batched_a8w8: exit code 3" in detail


def test_nothing_is_said_of_a_node_that_had_no_run(tmp_path: Path) -> None:
    t = Recorded(tmp_path, [1], [], [])
    t.steps["after"] = Step({"nodes": [{"locks": {}, "containers": []}]}, "exit code 3: ", "", tmp_path / "none")
    with pytest.raises(NotTriedError, match="no run was on the node"):
        check(19, t)
