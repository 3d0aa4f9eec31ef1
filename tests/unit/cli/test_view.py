"""The live view, the plain lines, and text that is safe on a terminal."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from orchestrator import clean as ledger_clean
from orchestrator.cli.app import app
from orchestrator.cli.printer import plain
from orchestrator.cli.screen import LineView, node_row, picture, status_rows, summary_line
from orchestrator.controller.node_check import NodeReport
from orchestrator.engines import UNUSABLE, Finding
from orchestrator.errors import EngineError
from orchestrator.view.status import NodeStatus, RunStatus, SlotStatus
from orchestrator.view.words import duration
from worker.text import clean as worker_clean
from worker.text import plural, tail


def status() -> RunStatus:
    slot = SlotStatus("0", "busy", "g0001-1", "16x1280x8192  (g0001-1)", time.time() - 3)
    nodes = [
        NodeStatus("n1", "busy", [slot, SlotStatus("1", "idle")]),
        NodeStatus("n2", "unreachable", detail="no answer"),
    ]
    return RunStatus("r1", "running", total=10, tuned=4, failed=1, running=1, nodes=nodes, rate_per_min=2.5, eta_s=65)


def test_the_picture_shows_progress_and_every_slot() -> None:
    console = Console(width=110, record=True, force_terminal=False)
    console.print(picture(status()))
    text = console.export_text()
    for words in ("r1", "5/10", "4 tuned", "1 failed", "4 pending", "2.5 shapes/min", "1 min 05 s left", "16x1280x8192",
                  "n2", "unreachable", "no answer", "idle"):  # fmt: skip
        assert words in text, words


def fleet(nodes: int = 200, slots: int = 8) -> list[NodeStatus]:
    """A fleet at work, of which node n007 has a quarantined slot and n150 does not answer."""
    states = [[SlotStatus(str(k), "busy", "a") for k in range(slots)] for _ in range(nodes)]
    states[7][3] = SlotStatus("3", "quarantined")
    found = [NodeStatus(f"n{i:03}", "busy", of, tuned=5) for i, of in enumerate(states)]
    found[7].detail = "3 faults of 2 shapes that passed elsewhere"
    found[150].state, found[150].detail = "unreachable", "no answer"
    return found


def test_of_many_slots_the_nodes_that_need_a_look_come_first_and_the_rest_is_summed_up() -> None:
    s = status()
    s.nodes = fleet()
    console = Console(width=140, record=True)
    console.print(picture(s))
    lines = [" ".join(line.split()) for line in console.export_text().splitlines()]
    at = next(i for i, line in enumerate(lines) if line.startswith("n007"))
    assert lines[at] == "n007 8x busy 7 busy, 1 quarantined: 3 faults of 2 shapes that passed elsewhere"
    assert lines[at + 1] == "n150 8x unreachable 8 unreachable: no answer"
    assert "... and 176 more nodes with 1,408 slots: 1,408 busy; 880 tuned, 0 failed" in lines
    assert len(lines) < 32


def test_plain_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    view = LineView(every=0.0)
    view.update(status())
    view.update(status())
    view.note("a slot \x1b[31mfell\x1b[0m\nover", bad=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "4/10 shapes tuned, 1 failed, 1 running, 2.5/min, about 1 min 05 s left"
    assert len(lines) == 2, "an unchanged line is not repeated"
    assert "\x1b" not in lines[1]
    assert lines[1].startswith("! a slot ")


COMMAND = f"ssh-keyscan -p 2222 gpu01 >>{'/home/somebody/with/a/long/path' * 20}/known_hosts"
UNKNOWN_KEY = f"the key that gpu01:2222 shows is not known; add it: {COMMAND}"


def test_nodes_check_cuts_no_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = NodeReport("gpu01", (Finding(UNUSABLE, "connection", UNKNOWN_KEY),))
    monkeypatch.setattr("orchestrator.controller.node_check.check_nodes", lambda *_, **__: [report])
    (tmp_path / "inv.yaml").write_text("nodes: {gpu01: {transport: ssh}}\n")
    done = CliRunner().invoke(app, ["nodes", "check", "-i", str(tmp_path / "inv.yaml")])
    assert done.exit_code == 3
    assert COMMAND in done.stdout


def test_status_cuts_no_command() -> None:
    node = NodeStatus("gpu01", "unreachable", [SlotStatus("0")], detail=UNKNOWN_KEY)
    assert COMMAND in status_rows(node)[0][-1]
    assert COMMAND in node_row(node)[-1]
    s = status()
    s.nodes = [node]
    console = Console(width=110, record=True, force_terminal=False)
    console.print(picture(s))
    assert COMMAND.replace(" ", "") in "".join(console.export_text().split())


def test_json_has_what_was_promised() -> None:
    doc = status().to_json()
    assert doc["shapes"] == {"total": 10, "tuned": 4, "skipped": 0, "failed": 1, "running": 1, "pending": 4}
    assert {k: doc["nodes"][0][k] for k in ("name", "state", "slots", "running", "tuned", "failed")} == {
        "name": "n1", "state": "busy", "slots": 2, "running": 1, "tuned": 0, "failed": 0,
    }  # fmt: skip
    assert doc["eta_s"] == 65
    assert summary_line(RunStatus("r", "planned", total=3)) == "0/3 shapes tuned"
    assert summary_line(RunStatus("r", "planned", total=3, tuner="bench")) == "0/3 shapes measured"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(None, "unknown"), (0, "0 s"), (59.6, "1 min 00 s"), (125, "2 min 05 s"), (11400, "3 h 10 min")],
)
def test_durations(seconds: float | None, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ("\x1b[1;31m[GPU Fault]\x1b[0m Task 3 failed", "[GPU Fault] Task 3 failed"),
        ("\x1b[38;2;255;100;0morange\x1b[m", "orange"),
        ("\x1b]0;a title\x07then words", "then words"),
        ("\x1b]8;;https://x\x1b\\a link\x1b]8;;\x1b\\", "a link"),
        ("\x1b]0;a title without an end", ""),
        ("cut in a colour \x1b[3", "cut in a colour"),
        ("\x9b31mC1\x9b0m", "C1"),
    ],
)
def test_colours_of_remote_programs_leave_nothing_behind(printed: str, shown: str) -> None:
    """On every way of a remote program's words: to a terminal, into a record, into the ledger, into an error."""
    assert plain(printed) == shown
    assert worker_clean(printed) == shown
    assert ledger_clean.text(printed) == shown
    assert str(EngineError("n1", printed)).strip() == f"n1: {shown}".strip()


def test_a_log_that_is_cut_does_not_begin_within_a_colour(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("x" * 50 + "\x1b[31mred\x1b[0m\nlast line\n")
    with log.open() as f:
        assert tail(f.fileno(), 0, 20) == "last line"


def test_counted_nouns_agree_in_number() -> None:
    assert [plural(n, "shape") for n in (0, 1, 2, 5000)] == ["0 shapes", "1 shape", "2 shapes", "5,000 shapes"]
    assert [plural(n, "row is", "rows are") for n in (1, 3)] == ["1 row is", "3 rows are"]
