"""What a person sees: the live picture, the plain lines, safe text."""

from __future__ import annotations

import time

import pytest
from rich.console import Console

from orchestrator.cli.view import LineView, picture, plain, summary_line
from orchestrator.status import NodeStatus, RunStatus, SlotStatus, duration


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


def test_many_slots_are_cut() -> None:
    s = status()
    s.nodes = [NodeStatus(f"n{i}", slots=[SlotStatus(str(k)) for k in range(8)]) for i in range(10)]
    console = Console(width=110, record=True)
    console.print(picture(s))
    assert "... and 56 more slots" in console.export_text()


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


def test_plain_caps_and_cleans() -> None:
    assert plain("a\tb\x07c", 100) == "a b\N{REPLACEMENT CHARACTER}c"
    assert len(plain("x" * 1000, 50)) == 50


def test_json_has_what_was_promised() -> None:
    doc = status().to_json()
    assert doc["shapes"] == {"total": 10, "tuned": 4, "skipped": 0, "failed": 1, "running": 1, "pending": 4}
    assert {k: doc["nodes"][0][k] for k in ("name", "state", "slots", "running", "tuned", "failed")} == {
        "name": "n1", "state": "busy", "slots": 2, "running": 1, "tuned": 0, "failed": 0,
    }  # fmt: skip
    assert doc["eta_s"] == 65
    assert summary_line(RunStatus("r", "planned", total=3)) == "0/3 shapes tuned"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(None, "unknown"), (0, "0 s"), (59.6, "1 min 00 s"), (125, "2 min 05 s"), (11400, "3 h 10 min")],
)
def test_durations(seconds: float | None, words: str) -> None:
    assert duration(seconds) == words
