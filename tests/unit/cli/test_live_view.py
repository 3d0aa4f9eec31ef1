"""The live view, the plain lines, and text that is safe on a terminal."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pytest
from rich.console import Console

from orchestrator import clean
from orchestrator.cli.live_view import LineView, RichView, make_view, picture
from orchestrator.cli.printer import plain
from orchestrator.cli.status import Screen
from orchestrator.cli.status_rows import node_row, slot_rows
from orchestrator.engines import UNUSABLE, Finding
from orchestrator.errors import EngineError
from orchestrator.ledger.reader import Counts
from orchestrator.machines.node_check import NodeReport
from orchestrator.paths import RunPaths
from orchestrator.view.status import NodeStatus, RunStatus, SlotStatus
from tests.kits.fleet import command
from worker.text import byte_words, tail
from worker.text import clean as worker_clean


def status(*nodes: NodeStatus) -> RunStatus:
    slot = SlotStatus("0", "busy", "g0001-1", "16x1280x8192  (g0001-1)", time.time() - 3)
    usual = (
        NodeStatus("n1", "busy", [slot, SlotStatus("1", "idle")]),
        NodeStatus("n2", "unreachable", detail="no answer"),
    )
    of = [*(nodes or usual)]
    counts = Counts(total=10, tuned=4, failed=1, running=1, pending=4)
    return RunStatus("r1", "running", counts, nodes=of, rate_per_min=2.5, eta_s=65)


def drawn(s: RunStatus, width: int = 140) -> str:
    console = Console(width=width, record=True, force_terminal=False)
    console.print(picture(s))
    return console.export_text()


def test_of_many_slots_the_nodes_that_need_a_look_come_first_and_the_rest_is_summed_up() -> None:
    """A fleet at work, of which node n007 has a quarantined slot and n150 does not answer."""
    nodes = [
        NodeStatus(f"n{i:03}", "busy", [SlotStatus(str(k), "busy", "a") for k in range(8)], tuned=5) for i in range(200)
    ]
    nodes[7].slots[3] = SlotStatus("3", "quarantined")
    nodes[7].detail = "3 faults of 2 shapes that passed elsewhere"
    nodes[150].state, nodes[150].detail = "unreachable", "no answer"
    lines = [" ".join(line.split()) for line in drawn(status(*nodes)).splitlines()]
    at = next(i for i, line in enumerate(lines) if line.startswith("n007"))
    assert lines[at : at + 2] == [
        "n007 8x busy 7 busy, 1 quarantined: 3 faults of 2 shapes that passed elsewhere",
        "n150 8x unreachable 8 unreachable: no answer",
    ]
    assert "... and 176 more nodes with 1,408 slots: 1,408 busy; 880 tuned, 0 failed" in lines
    assert len(lines) < 32


def test_plain_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    view = LineView(every=0.0)
    view.update(status())
    view.update(status())
    view.note("a slot \x1b[31mfell\x1b[0m\nover", bad=True)
    view.update(RunStatus("r", "planned", Counts(total=3, pending=3), tuner="bench"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "4/10 shapes tuned, 1 failed, 1 running, 2.5/min, about 1 min 05 s left"
    assert len(lines) == 3, "an unchanged line is not repeated"
    assert "\x1b" not in lines[1]
    assert lines[1].startswith("! a slot ")
    assert lines[2] == "0/3 shapes measured"


@pytest.mark.parametrize(("term", "view"), [("xterm", RichView), ("dumb", LineView)])
def test_a_terminal_that_cannot_be_redrawn_gets_plain_lines(
    term: str, view: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller, terminal = os.openpty()
    with open(controller, "rb"), open(terminal, "w") as out:
        monkeypatch.setattr("sys.stdout", out)
        monkeypatch.setenv("TERM", term)
        with contextlib.closing(make_view()) as made:
            assert type(made) is view


def test_a_run_goes_on_if_nobody_reads_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as out:
        monkeypatch.setattr("sys.stdout", out)
        with pytest.raises(BrokenPipeError):
            LineView(needs_reader=True).note("status --watch | head ends")
        LineView().note("tune | tee log goes on")
        print("its last page has nowhere to go either", flush=True)


def test_no_view_cuts_a_command_that_is_to_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    typed = f"ssh-keyscan -p 2222 gpu01 >>{'/home/somebody/with/a/long/path' * 20}/known_hosts"
    unknown = f"the key that gpu01:2222 shows is not known; add it: {typed}"
    report = NodeReport("gpu01", (Finding(UNUSABLE, "connection", unknown),))
    monkeypatch.setattr("orchestrator.machines.node_check.check_nodes", lambda *_, **__: [report])
    (tmp_path / "inv.yaml").write_text("nodes: {gpu01: {transport: ssh}}\n")
    done = command("nodes", "check", "-i", str(tmp_path / "inv.yaml"))
    assert (done.code, typed in done.out) == (3, True)
    node = NodeStatus("gpu01", "unreachable", [SlotStatus("0")], detail=unknown)
    assert typed in slot_rows(node)[0][-1]
    assert typed in node_row(node)[-1]
    assert typed.replace(" ", "") in "".join(drawn(status(node), 110).split())


@pytest.mark.parametrize(("usable", "code"), [((True, True), 0), ((True, False), 1), ((False, False), 3)])
def test_the_exit_code_of_nodes_check(
    usable: tuple[bool, bool], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = [
        NodeReport(f"n{i}", () if well else (Finding(UNUSABLE, "disk", "full", ""),), skew_s=-0.2)
        for i, well in enumerate(usable)
    ]
    monkeypatch.setattr("orchestrator.machines.node_check.check_nodes", lambda *_, **__: reports)
    (tmp_path / "inv.yaml").write_text("nodes: {n0: {transport: ssh}, n1: {transport: ssh}}\n")
    done = command("nodes", "check", "-i", str(tmp_path / "inv.yaml"))
    assert done.code == code
    assert "-0 s" not in done.out


@pytest.mark.parametrize(
    ("count", "words"), [(275 * 2**30, "275 GiB"), (1.5 * 2**30, "1.5 GiB"), (12 * 2**20, "12 MiB")]
)
def test_a_size_of_memory_in_words(count: float, words: str) -> None:
    assert byte_words(count) == words


def test_an_error_names_its_node_once() -> None:
    inner = EngineError("h2", "no space left")
    assert str(EngineError("h2", str(inner))) == "h2: no space left"


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ("\x1b[1;31m[GPU Fault]\x1b[0m Task 3 failed", "[GPU Fault] Task 3 failed"),
        ("\x1b]0;a title\x07then words", "then words"),
        ("\x1b]8;;https://x\x1b\\a link\x1b]8;;\x1b\\", "a link"),
        ("\x1b]0;a title without an end", ""),
        ("cut in a colour \x1b[3", "cut in a colour"),
        ("\x9b31mC1\x9b0m", "C1"),
    ],
)
def test_colours_of_remote_programs_leave_nothing_behind(printed: str, shown: str, tmp_path: Path) -> None:
    """On every way of a remote program's words: to a terminal, into a record, into the ledger, into an error."""
    assert plain(printed) == worker_clean(printed) == clean.text(printed) == shown
    assert str(EngineError("n1", printed)).strip() == f"n1: {shown}".strip()
    log = tmp_path / "log"
    log.write_text("x" * 50 + "\x1b[31mred\x1b[0m\nlast line\n")
    with log.open() as f:
        assert tail(f.fileno(), 0, 20) == "last line", "a log that is cut does not begin within a colour"


@pytest.mark.parametrize("seconds", [3, 65, 694 * 86400])
def test_status_keeps_its_columns_below_their_heads_however_long_ago_a_shape_began(
    seconds: float, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = {"health": "ok", "use_pct": 97}
    slot = SlotStatus("0", "busy", "g0002", "2x16x64  (g0002)", time.time() - seconds, gpu=gpu)
    node = NodeStatus("here", "ready", [slot, SlotStatus("1", "idle", gpu=gpu)])
    screen = Screen(RunStatus("r", "interrupted", Counts(total=2, pending=2), nodes=[node], tuner="faulty"))
    screen.show_run(RunPaths(Path("r")))
    screen.show_node(node)
    *_, heads, busy, idle = capsys.readouterr().out.splitlines()
    assert [line.index("97 %") for line in (busy, idle)] == [heads.index("GPU now")] * 2
    assert busy.index("2x16x64") == heads.index("measuring now")
