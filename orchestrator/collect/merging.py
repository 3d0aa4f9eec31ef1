"""Collected rows merged by key: one winner a shape, every candidate kept, shapes without a winner explained. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from orchestrator.collect.reading import Content
from orchestrator.reasons import Reason
from orchestrator.tables.tuned import Key, KeyFault, key_dict, key_of, number_of
from orchestrator.tuned_db.merge_policy import Newcomer, champions
from worker.families import Family
from worker.text import plural

Chip = tuple[str, int]


@dataclass(slots=True)
class Merged:
    """`winners` by key with where each came from; `candidates` in the order read; `failed`: (key, reason, why,
    node)."""

    winners: dict[Key, tuple[Newcomer, str]] = field(default_factory=dict)
    candidates: list[tuple[Key, dict[str, str], str, str, str]] = field(default_factory=list)
    """(key, cells, node, file, status)"""
    failed: list[tuple[Key, Reason, str, str]] = field(default_factory=list)
    rebuilt: int = 0
    """Winners that no tuned table had: taken from a profile."""
    notes: list[str] = field(default_factory=list)


def merge(contents: Iterable[Content], family: Family, err_ratio: float, chips: Mapping[str, Chip]) -> Merged:
    """Merge the tuned and profile files of a family. `chips`: the (gfx, cu_num) of nodes where they are known, for
    tables from before AITER wrote gfx.

    The fastest valid row of a tuned table wins its key; a key that no tuned table has goes to the fastest valid
    candidate of the profiles. Rows of different gfx or cu_num have different keys.
    """
    out = Merged()
    tuned: list[dict[str, str]] = []
    profile: list[dict[str, str]] = []
    for content in contents:
        if content.kind not in ("tuned", "profile"):
            continue
        bad = 0
        for row in content.rows:
            cells = {**_gfx(row, chips.get(content.of.node)), **row}
            where = f"{content.of.node}:{content.of.name}"
            try:
                key = key_of(cells, family)
            except KeyFault:
                bad += 1
                continue
            (tuned if content.kind == "tuned" else profile).append({**cells, "_from": where})
            if content.kind == "profile":
                status = _status(cells, family, err_ratio)
                out.candidates.append((key, cells, content.of.node, content.of.name, status))
        if bad:
            content.notes.append(f"dropped {plural(bad, 'row')} without a whole key")
    for rows in (tuned, profile):
        best, _ = champions(rows, family, err_ratio)
        for new in best:
            if new.key not in out.winners:
                out.rebuilt += rows is profile
                out.winners[new.key] = (new, new.cells.pop("_from"))
    _explain(out, tuned, family, err_ratio)
    chips_met = {(str(k[0]), int(k[1])) for k in out.winners}
    if len(chips_met) > 1:
        met = ", ".join(f"{g} with {c}" for g, c in sorted(chips_met))
        out.notes.append(f"rows of several chips, which are different keys: {met}")
    return out


def _gfx(row: Mapping[str, str], chip: Chip | None) -> dict[str, str]:
    return {"gfx": chip[0]} if chip and row.get("cu_num") == str(chip[1]) else {}


def _status(cells: Mapping[str, str], family: Family, err_ratio: float) -> str:
    """As in profile.csv: a candidate without a time was unsupported (-1) or ended its process (inf)."""
    us = number_of(cells.get("us", ""))
    if us is None:
        return "error"
    if us <= 0:
        return "unsupported"
    err = number_of(cells.get(family.err_column, ""))
    wrong = family.err_column != "err1" and (err is None or not 0 <= err <= err_ratio)
    return "wrong" if wrong else "ok"


def _explain(out: Merged, tuned: list[dict[str, str]], family: Family, err_ratio: float) -> None:
    """Shapes that were tried and have no winner."""
    import pandas as pd

    tried = pd.DataFrame(
        [(key, node, status) for key, _, node, _, status in out.candidates if key not in out.winners],
        columns=pd.Index(["key", "node", "status"]),
    )
    key: Key
    for _, rows in tried.groupby("key", sort=False):
        key = rows["key"].iloc[0]
        counts = rows["status"].value_counts().sort_index()
        words = ", ".join(f"{n} {status}" for status, n in counts.items())
        why = f"{plural(len(rows), 'candidate')}: {words}" if key[0] else "its gfx is not known"
        reason = Reason.WRONG_RESULT if "wrong" in counts else Reason.NO_CANDIDATE
        out.failed.append((key, reason, why, rows["node"].iloc[-1]))
    known = {c[0] for c in out.candidates} | out.winners.keys()
    for row in tuned:
        key = key_of(row, family)
        if key not in known:
            known.add(key)
            limit = f"the row of the tuned table is not valid (us, error above {err_ratio:g}, or no gfx)"
            out.failed.append((key, Reason.WRONG_RESULT, limit, row["_from"].partition(":")[0]))


def row_of(key: Key, cells: Mapping[str, str], family: Family) -> list[str]:
    """A row in the columns of the family's tuned table."""
    named = {**cells, **{n: str(v) for n, v in key_dict(key, family).items()}}
    return [named.get(n, "") for n in family.tuned_header]
