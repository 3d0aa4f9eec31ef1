"""The winners of an engine's files, cut from the measured M of a run (`documents_of_points`).

A worker sends a record for each M that it measured (worker/triton_configs/point_record.py). Those of one file, of all
attempts, are cut into ranges here. Each measured M of a range that changes becomes a document like those of AITER's
buckets, with this M alone among its points, which is what `tuned.csv` and a merge read:

    {"file": "N=2112,K=7168,...json", "layer": {...}, "device": {...}, ..., "key": 96, "first": 81, "last": 128,
     "values": {"BLOCK_SIZE_M": 64, ...}, "old": [{...}], "points": [[96, 1.0, 17.5, 14.1, 0.0, 0, ""]]}
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from worker.triton_configs.cutting import KEEP, CutRange, MeasuredPoint, cut_ranges, unite_points
from worker.triton_configs.m_ranges import USUAL_KEYS
from worker.triton_configs.point_record import PointRecord, values_of


def documents_of_points(records: Iterable[PointRecord]) -> list[str]:
    """The documents of all ranges that change, file by file."""
    by_file: dict[str, list[PointRecord]] = {}
    for record in records:
        by_file.setdefault(json.dumps(record.file, sort_keys=True), []).append(record)
    return [document for file in sorted(by_file) for document in _documents_of_file(by_file[file])]


def _documents_of_file(records: Sequence[PointRecord]) -> Iterator[str]:
    points = unite_points(record.point for record in records)
    values = values_of(records)
    for m_range in cut_ranges(points):
        if m_range.config == KEEP:
            continue
        facts = {
            **records[0].file,
            "key": _key_within(m_range),
            "first": m_range.first,
            "last": m_range.last,
            "values": values[m_range.config],
        }
        for point in points:
            if m_range.holds(point.m):
                measured = _document_point(point, m_range.config, records)
                yield json.dumps({**facts, "old": [values[point.today]], "points": [measured]})


def _key_within(m_range: CutRange) -> int:
    """The key of a range: a usual one, if it has one."""
    return next(filter(m_range.holds, USUAL_KEYS), m_range.first)


def _document_point(point: MeasuredPoint, config: str, records: Sequence[PointRecord]) -> list[Any]:
    """`[M, count, old us (-1: does not run), new us, errRatio, place of the old values, label]`."""
    errors = [
        time.err_ratio
        for record in records
        if (record.m, record.label) == (point.m, point.label)
        for time in record.times
        if time.name == config
    ]
    old_us = point.us.get(point.today, -1.0)
    return [point.m, point.count, old_us, point.us[config], max(errors), 0, point.label]
