"""The winners on which all searches of a run agree.

`decide_winners` takes the rows and the measured M of a run, `join_decisions` the decisions in them
(`bucket_decision.py`): rows of one bucket from one attempt are one `BucketDecision`. If attempts decided differently on
a bucket (its group was split after a fault), it keeps what it has. `winners.py` writes and reads the files of the
winners.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from orchestrator.configs.bucket_decision import BucketDecision, BucketPlace, parse_decision
from orchestrator.configs.cut_winners import documents_of_points
from orchestrator.tables.keys import best_by_key
from worker.families import Family
from worker.triton_configs.point_record import PointRecord

DOCUMENT_FIELD = "triton_config"
"""The field of a winner's row in the ledger that holds its bucket's document."""


def decide_winners(
    family: Family,
    rows: Iterable[tuple[Sequence[int | str], Mapping[str, Any]]],
    points: Iterable[PointRecord] = (),
) -> tuple[dict[BucketPlace, BucketDecision], list[str]]:
    """(new values by bucket, sentences on buckets that were left out) of winners, (key, further fields) each, and of
    measured M.

    Rows without a bucket's document are left out. Ranges of a file that overlap stay as they are, and so do all of a
    file that two devices or engines measured.
    """
    documents: list[str] = []
    for key, fields in rows:
        columns = dict(zip(family.key_names, key, strict=True))
        documents.append(_document_with_shape(columns, fields.get(DOCUMENT_FIELD)))
    documents += documents_of_points(points)
    decisions = map(parse_decision, dict.fromkeys(documents))  # rows of one bucket may have the same document
    return join_decisions([decision for decision in decisions if decision is not None])


def join_decisions(decisions: Sequence[BucketDecision]) -> tuple[dict[BucketPlace, BucketDecision], list[str]]:
    """(the winner of each bucket on which all searches agree, sentences on the other buckets)."""
    by_place: dict[BucketPlace, list[BucketDecision]] = {}
    for decision in decisions:
        candidates = by_place.setdefault(decision.place, [])
        same = next((candidate for candidate in candidates if candidate.values == decision.values), None)
        if same:
            same.measured.extend(decision.measured)
        else:
            candidates.append(decision._replace(measured=list(decision.measured)))
    clashes = _find_clashes([decision.place for decision in decisions])
    winners: dict[BucketPlace, BucketDecision] = {}
    notes: list[str] = []
    for place, candidates in by_place.items():
        if len(candidates) > 1:
            notes.append(
                f"{place.file}: {place.bucket} stays as it is: {len(candidates)} searches decided differently (shapes"
                " that differ in more than M, or a group that was split)"
            )
        elif candidates[0].values and place not in clashes:
            winners[place] = _without_repeated_rows(candidates[0])
    for place, other in clashes.items():
        notes.append(
            f"{place.file}: {place.bucket} stays as it is: {other.bucket} was decided as well, by another search"
        )
    return winners, notes


def _find_clashes(places: Sequence[BucketPlace]) -> dict[BucketPlace, BucketPlace]:
    """Ranges that cannot stand in one file, each with the last that it clashes with."""
    clashes: dict[BucketPlace, BucketPlace] = {}
    for place in places:
        for other in places:
            if place.clashes_with(other):
                clashes[place] = other
    return clashes


def _without_repeated_rows(winner: BucketDecision) -> BucketDecision:
    """The winner with one row for each shape: the shape's own, which has its count, before one of a bound."""
    rows = best_by_key(winner.measured, lambda r: (r.b, r.n, r.k, r.m, r.caller), lambda r: r.count == 0)
    return winner._replace(measured=[rows[shape] for shape in sorted(rows)])


def _document_with_shape(key: Mapping[str, int | str], text: Any) -> str:
    """The document of a row with the (B, N, K) of its key; "" if the row has none."""
    try:
        return json.dumps({**json.loads(text), "shape": [key.get(name) for name in "BNK"]})
    except (ValueError, TypeError):
        return ""
