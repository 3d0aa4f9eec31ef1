"""The benchmark of many nodes, with few: it replaces parts of the controller, so it has to keep up with them."""

from __future__ import annotations

from pathlib import Path

from benchmarks import scale


def test_a_load_with_nothing_ahead_is_measured_whole(tmp_path: Path) -> None:
    size = scale.Size(nodes=2, slots=2, shapes=200, seconds=0.2, warm_up_s=1.0, measured_s=5.0, ahead=False)
    figures = {figure.name.partition(",")[0]: figure.value for figure in scale.measure(tmp_path, size)}
    assert set(figures) == {
        "completions",
        "CPU time of the controller's loop a completion",
        "ledger commit",
        "controller's memory",
        "idle to next spec",
        "the controller's part of it",
    }
    assert all(value > 0 for value in figures.values())
