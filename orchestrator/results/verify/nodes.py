"""A verification on one node: the rows are shared out to its slots, and what each prints is read."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from orchestrator.errors import OrchestratorError
from orchestrator.inventory import Inventory, Node
from orchestrator.results.verify.reading import Reading, Verified
from worker.families import Family, backend_of

AT_ONCE = 5
"""Slots of a node at once: a connection carries so many channels beside what tidies up."""
_COMPILED = ("ck", "cktile", "opus")
Row = Mapping[str, str]


def verify_on(
    known: Inventory, node: Node, of: Family, rows: Sequence[Row], say: Callable[[str], None], *, accept: bool
) -> Verified:
    """The node's answer for all rows, also where it cannot. `say` gets each line that AITER prints, with its slot."""
    from orchestrator.nodes.command import WorkerHost, deployed_on

    shares: dict[str, list[int]] = {}

    def files(slots: tuple[str, ...]) -> dict[str, bytes]:
        shares.update(zip(slots, shared(rows, of.name, len(slots)), strict=True))
        return {_file(slot): _table([rows[i] for i in mine]) for slot, mine in shares.items() if mine}

    def one(place: WorkerHost, slot: str) -> Verified:
        reading = Reading(node.name, [rows[i] for i in shares[slot]], of)

        def line(text: str) -> None:
            reading.line(text)
            say(f"{slot}: {text}")

        try:
            ended = place.run(["verify", _file(slot), "--family", of.name, "--slot", slot, "--until-eof"], line)
        except OrchestratorError as e:
            ended = e.reason
        if not reading.found.told and not reading.found.why:
            reading.found.why = f"the worker {ended}"
        return reading.found

    try:
        with deployed_on(known, node, "verify", files=files, accept_new_host_keys=accept) as place:
            busy = [s for s in place.slots if shares[s]]
            with ThreadPoolExecutor(max_workers=max(1, min(AT_ONCE, len(busy)))) as pool:
                found = dict(zip(busy, pool.map(lambda s: one(place, s), busy), strict=True))
    except OrchestratorError as e:
        return Verified(node.name, Reading(node.name, rows, of).found.rows, why=e.reason)
    return _together(node.name, len(rows), shares, found)


def shared(rows: Sequence[Row], family: str, slots: int) -> list[list[int]]:
    """The numbers of the rows for each slot. Rows of one compiled kernel stay together, so that it is compiled once."""
    groups: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        compiled = backend_of(family, row) in _COMPILED
        groups.setdefault(row.get("kernelName", "") if compiled else f"\0{i}", []).append(i)
    out: list[list[int]] = [[] for _ in range(slots)]
    for group in sorted(groups.values(), key=lambda g: (-len(g), g)):
        min(out, key=len).extend(group)
    return [sorted(mine) for mine in out]


def _together(name: str, rows: int, shares: Mapping[str, Sequence[int]], found: Mapping[str, Verified]) -> Verified:
    """One answer of the slots'. A slot that could not verify leaves its rows unproven, with its reason."""
    good = [v for v in found.values() if not v.why]
    first = (good or list(found.values()))[0]
    by_row = {}
    for slot, one in found.items():
        for i, row in zip(shares[slot], one.rows, strict=True):
            row.why = row.why or (f"slot {slot}: {one.why}" if one.why else "")
            by_row[i] = row
    failed = next((v for v in found.values() if v.code), first)
    why = "" if good else first.why
    return Verified(name, [by_row[i] for i in range(rows)], first.told, why, failed.code, failed.last)


def _file(slot: str) -> str:
    return f"verify-{slot}.csv"


def _table(rows: Sequence[Row]) -> bytes:
    out = io.StringIO()
    header = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([row.get(n, "") for n in header] for row in rows)
    return out.getvalue().encode()
