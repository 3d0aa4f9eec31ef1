"""What may stand in one table: images and tuner versions do not mix silently (law 8), chips never. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from orchestrator.errors import TunedDBError
from orchestrator.results.champions import Newcomer, Rejected, key_dict
from orchestrator.results.table import GFX_OF_CU_NUM, TAG, Place, Table
from orchestrator.tuned_db.records import Record
from worker.families import Family

WORDS = {"image": "images", "tuner": "tuner versions"}
"""The fields of records.KNOWN, in its order."""


class MixedError(TunedDBError):
    """The newcomers are known to be of another image or tuner version than the table's rows."""


def mixing(
    path: Path, there: Mapping[Place, Record], places: Collection[Place], new: Mapping[Place, Record], *, allowed: bool
) -> list[str]:
    """What is to be said of the mixture that a table becomes; `places` are its old rows, `there` the records of those
    that are known, `new` the records of the rows to write.

    Raises MixedError where image or tuner version are known on both sides and differ, unless that is `allowed`.
    """
    faults: list[str] = []
    unknown: dict[str, list[str]] = {}
    chips = {f"{gfx} with cu_num {cu}": f"{gfx},{cu}," for gfx, cu in {tuple(p.split(",", 2)[:2]) for p in new}}
    old = {
        chip: Counter([_told(there.get(p)) for p in places if p.startswith(at) and p not in new])
        for chip, at in chips.items()
    }
    coming = {chip: Counter([_told(r) for p, r in new.items() if p.startswith(at)]) for chip, at in chips.items()}
    for at, (field, words) in enumerate(WORDS.items()):
        for chip in sorted(chips):
            has, comes = ({told[at] for told in side[chip]} - {""} for side in (old, coming))
            if len(comes) > 1 or (has and comes - has):
                what = f"{path}: {words} would mix on {chip}: "
                what += f"the table's rows are of {_listed(has)}, the newcomers of" if has else "the newcomers are of"
                faults.append(f"{what} {_listed(comes)}")
        sides = [
            f"{unknown_rows} of {sum(map(Counter.total, side.values()))} {word} rows"
            for side, word in ((coming, "new"), (old, "old"))
            if (unknown_rows := sum(n for told in side.values() for kind, n in told.items() if not kind[at]))
        ]
        if sides:
            unknown.setdefault(" and ".join(sides), []).append(field)
    if faults and not allowed:
        raise MixedError([*faults, "merge into a table of their own, or give --allow-mixed"])
    notes = [
        f"{path}: the {' and the '.join(fields)} of {sides} {'is' if len(fields) == 1 else 'are'} not known:"
        " that they match is taken on trust"
        for sides, fields in unknown.items()
    ]
    return [*faults, *notes]


def _told(record: Record | None) -> tuple[str, str]:
    """Image and tuner version, "" for what is not known."""
    return (record.image, record.tuner) if record else ("", "")


def _listed(values: Iterable[str]) -> str:
    found = sorted(values)
    return ", ".join(v[:80] for v in found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")


def placeable(table: Table, best: Sequence[Newcomer], family: Family) -> tuple[list[Newcomer], list[Rejected]]:
    """AITER counts `_tag` to the key: a row with one has no place in a table without the column."""
    if TAG in table.header:
        return list(best), []
    bad = [
        Rejected(key_dict(n.key, family), n.us, n.kernel, f"it has the {TAG} {n.tag}, and the table has no such column")
        for n in best
        if n.tag
    ]
    return [n for n in best if not n.tag], bad


def refuse_other_chips(table: Table, best: Sequence[Newcomer]) -> None:
    """In a table without a gfx column a row means the gfx that follows from its cu_num, and no other may go in."""
    if "gfx" in table.header:
        return
    odd = sorted({(str(n.key[0]), int(n.key[1])) for n in best if GFX_OF_CU_NUM.get(int(n.key[1])) != n.key[0]})
    if odd:
        which = ", ".join(f"{gfx} with cu_num {cu}" for gfx, cu in odd)
        raise TunedDBError(
            f"{table.path}:1: has no gfx column, so rows of {which} cannot be told from others in it;"
            " give the table a gfx column, or merge into another file"
        )
