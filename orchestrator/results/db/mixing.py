"""Rows of different images or tuner versions do not mix silently (law 8). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from orchestrator.errors import TunedDBError
from orchestrator.results.db.records import KNOWN, Record
from orchestrator.results.table import Place

Chip = tuple[str, int]
WORDS = {"image": "images", "tuner": "tuner versions"}


class MixedError(TunedDBError):
    """The newcomers are known to be of another image or tuner version than the table's rows."""


def mixing(
    path: Path, there: Mapping[Place, Record], places: Iterable[Place], new: Mapping[Place, Record], *, allowed: bool
) -> list[str]:
    """What is to be said of the mixture that a table becomes; `places` are its old rows, `there` the records of those
    that are known, `new` the records of the rows to write.

    Raises MixedError where image or tuner version are known on both sides and differ, unless that is `allowed`.
    """
    faults: list[str] = []
    unknown: dict[str, list[str]] = {}
    chips = {_chip(p) for p in new}
    old = [p for p in places if _chip(p) in chips and p not in new]
    for field, words in WORDS.items():
        unknown_new = sum(1 for r in new.values() if not getattr(r, field))
        unknown_old = sum(1 for p in old if p not in there or not getattr(there[p], field))
        for chip in sorted(chips):
            has = {getattr(r, field) for p, r in there.items() if _chip(p) == chip and p not in new} - {""}
            comes = {getattr(r, field) for p, r in new.items() if _chip(p) == chip} - {""}
            if len(comes) > 1 or (has and comes - has):
                what = f"{path}: {words} would mix on {chip[0]} with cu_num {chip[1]}: "
                what += f"the table's rows are of {_listed(has)}, the newcomers of" if has else "the newcomers are of"
                faults.append(f"{what} {_listed(comes)}")
        if unknown_new or unknown_old:
            sides = [f"{unknown_new} of {len(new)} new rows"] if unknown_new else []
            sides += [f"{unknown_old} of {len(old)} old rows"] if unknown_old else []
            unknown.setdefault(" and ".join(sides), []).append(field)
    if faults and not allowed:
        raise MixedError([*faults, "merge into a table of their own, or give --allow-mixed"])
    notes = [
        f"{path}: the {' and the '.join(fields)} of {sides} {'is' if len(fields) == 1 else 'are'} not known:"
        " that they match is taken on trust"
        for sides, fields in unknown.items()
    ]
    return [*faults, *notes]


def _chip(place: Place) -> Chip:
    return str(place[0][0]), int(place[0][1])


def _listed(values: Iterable[str]) -> str:
    found = sorted(values)
    return ", ".join(v[:80] for v in found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")


assert set(WORDS) == set(KNOWN)
