from __future__ import annotations

from pathlib import Path

from benchmarks.report import NODES, SLOTS, fleet_run
from orchestrator.controller.run_snapshot import RunSnapshot


def test_the_fleet_of_the_page_is_on_its_way(tmp_path: Path) -> None:
    status = RunSnapshot(fleet_run(tmp_path, 1200)).status()
    assert status.state == "interrupted"
    assert [len(n.slots) for n in status.nodes] == [SLOTS] * NODES
    assert 0 < status.counts.tuned < status.counts.total == 1200
