"""The search for a file: where its ranges meet, and which configs are its own."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.engine_search import search_file
from tests.support.engines import H200, config_values, copy_without_files
from tests.support.marks import WITH_TORCH
from tests.support.search_standin import StandIn, Timer
from worker.protocol import SpecShape
from worker.triton_configs.cutting import cut_ranges, unite_points
from worker.triton_configs.point_record import PointRecord, values_of
from worker.tuners.common.problem import Problem
from worker.tuners.engines import engine_file
from worker.tuners.engines.engine_file import KeySearch
from worker.tuners.search.measuring_server import MeasuringServer
from worker.tuners.search.tile_config import tile_config

pytestmark = WITH_TORCH
WANTED = {True: 16, False: 64}  # the best rows of a tile below M=75, and from there on


class StandInDevice(StandIn):
    """A device on which a config takes 5 us more for each halving or doubling of its rows away from the best."""

    def prepare(self, problem: Problem, seed: int, rotate_bytes: int, tick: object) -> str:
        self.m = problem.m
        return ""

    def timer(self, loaded: Any) -> Timer:
        c = loaded.candidate
        away = abs(math.log2(c.number("BLOCK_SIZE_M") / WANTED[self.m < 75])) + 0.3 * (c.number("BLOCK_SIZE_N") != 64)
        return Timer(20 + 5 * away)


def serve(conn: Any) -> None:
    MeasuringServer(conn, lambda: StandInDevice({}, "")).serve()


def test_ranges_meet_where_the_best_config_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but device and compiler is real. The default has 64 rows, which 80 likes and 64 does not."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from worker.tuners.engines.linear import LinearSource

    monkeypatch.setattr(engine_file, "LEAST_EXTRA_S", 1e6)
    source = LinearSource(str(copy_without_files(tmp_path)), H200)
    shapes = [SpecShape(i, {"M": m, "N": 2112, "K": 7168}) for i, m in enumerate((64, 80, 1), 1)]
    messages = search_file(tmp_path, source, serve, "a8w8_blockscale", shapes)
    rows = {m["shape"]: m["row"] for m in messages if m["type"] == "shape_tuned"}
    assert sorted(rows) == [1, 2, 3]
    assert all(row["us"] < 21 for row in rows.values()), "of the right rows of a tile"
    records = [PointRecord.from_document(m["point"]) for m in messages if m["type"] == "point_timed"]
    measured = {record.m for record in records}
    assert {1, 57, 64, 72, 80} <= measured
    assert max(measured) <= 80, "only the ranges of the workload's M are measured"
    ranges = cut_ranges(unite_points(record.point for record in records))
    values = values_of(records)
    default = {"BLOCK_SIZE_M": 64}
    rows_of_tile = {(r.first, r.last): values.get(r.config, default)["BLOCK_SIZE_M"] for r in ranges}
    assert rows_of_tile[1, 1] == 16
    ends = {ends: tile for ends, tile in rows_of_tile.items() if ends != (1, 1)}
    assert {tile for (_, last), tile in ends.items() if last < 75} == {16}
    assert {tile for (first, _), tile in ends.items() if first >= 75} == {64}


def test_the_files_configs_are_winners_and_those_that_come_near_with_other_rows() -> None:
    tiles = [(64, 64), (64, 32), (16, 64), (32, 64), (16, 32)]
    search_task = SimpleNamespace(candidates=[tile_config(config_values(m, n)) for m, n in tiles])
    task: Any = SimpleNamespace(search_task=search_task, problem=SimpleNamespace(is_sustained=False))
    us = dict(enumerate([10.0, 10.1, 10.9, 11.5, 10.8]))
    search: Any = SimpleNamespace(measured={i: SimpleNamespace(us=us[i]) for i in us})
    assert KeySearch.choose_finalists(cast("KeySearch", None), task, search) == [0, 4]
    task.problem.is_sustained = True
    assert KeySearch.choose_finalists(cast("KeySearch", None), task, search) == [0]
