"""The record of the environment that measured one side of a comparison: written by a bench, read by `compare`.

It is `NAME.env.json` beside `NAME.csv`, or `environment.json`: one JSON object of plain values, such as

    {"format": 1, "env": "new (/opt/py/bin/python)", "order": "interleaved", "session": "20261129-1", "side": 2,
     "node": "n1", "slot": "0", "timer": "events", "gpu": "AMD Instinct MI355X", "triton_version": "3.6.0",
     "switches": {"AITER_X": "1"}, "under_test": "switches.AITER_X"}

docs/reference/files.md lists the known fields. `switches` holds environment variables. Other fields are shown and
compared as well. `compare` calls `read_record` for each file and `join_records` for each side (`sides.py`), then
`refuse_swapped_sides`, `took_turns` and `differences` for both (`comparison.py`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path

from orchestrator import clean
from orchestrator.errors import InputError
from orchestrator.files.cells import utc
from orchestrator.files.faults import escaped
from orchestrator.files.read import read_bytes
from orchestrator.pages import Document

FORMAT = 1
MAX_RECORD = 256 * 1024
"""Bytes of a record."""
_RECORD_NAMES = {"torch": "torch_version", "triton": "triton_version", "aiter": "aiter_tree", "device": "gpu"}
"""The names of a stack's facts in its record, where they differ."""
_NOT_IN_RECORD = ("hosts", "python_path", "image", "threads", "variables")
Fields = dict[str, str]
"""A record as `compare` has it: all values as text, a member of an object as `switches.NAME`."""
# The meaning of a difference in a field, the most serious first. machine: no verdict on the software is possible.
# method: measured in another way or on another card. other: every field that is not listed. test: the comparison is
# about it. name: no meaning.
KINDS = {
    "machine": ("gfx", "gpu", "cu_num"),
    "method": ("timer", "warmup", "iters", "node", "slot", "gpu_serial", "driver", "clocks"),
    "other": (),
    "test": ("triton_version", "triton_commit", "llvm_commit", "configs"),
    "name": ("format", "env", "captured", "order", "session", "side", "python", "under_test"),
}


def make_record(session: str, side: str, number: int, stack: Document, places: Fields) -> Document:
    """The record of one side of a bench: measured in turn with the others of the same `session`.

    `number` counts the sides in the order of `--env`, from 1. `compare` refuses a golden side that came after the tot
    side. `stack`: the facts of its software (`bench.environments`). `places`: node, slot and timer, as text.
    """
    path = stack.get("image") or stack.get("python_path")
    record: Document = {
        "format": FORMAT,
        "env": f"{side} ({path})" if path else side,  # `place_of` reads it
        "captured": utc(time.time()),
        "order": "interleaved",
        "session": session,
        "side": number,
        **places,
    }
    record |= {_RECORD_NAMES.get(name, name): value for name, value in stack.items() if name not in _NOT_IN_RECORD}
    variables = stack.get("variables")
    if variables:
        record["switches"] = {**record.get("switches", {}), **variables}
        record["under_test"] = " ".join(f"switches.{name}" for name in variables)
    return record


def place_of(record: Fields) -> str:
    """The interpreter or image of a side of a bench, whose `env` is `NAME (PLACE)`; "" if the record names none."""
    return record.get("env", "").partition(" (")[2].removesuffix(")")


def join_records(records: Iterable[Fields]) -> Fields:
    """The fields of several records as one record. Values that differ are listed side by side."""
    values: dict[str, set[str]] = {}
    for record in records:
        for name, value in record.items():
            values.setdefault(name, set()).add(value)
    return {name: " | ".join(sorted(texts)) for name, texts in values.items()}


def read_record(path: Path) -> Fields:
    """A record as text fields, without those that hold nothing. Raises InputError."""
    where = escaped(str(path))
    try:
        document = json.loads(read_bytes(path, MAX_RECORD, InputError))
    except (ValueError, RecursionError) as e:
        raise InputError(f"{where}:{getattr(e, 'lineno', 1)}: is not JSON: correct it or move it away") from None
    if not isinstance(document, dict) or document.get("format", FORMAT) != FORMAT:
        raise InputError(f"{where}:1: is not an environment record, which is one JSON object of format {FORMAT}")
    values: Document = {}
    for name, value in clean.document(document).items():
        if isinstance(value, dict):
            values |= {f"{name}.{member}": inner for member, inner in value.items()}
        else:
            values[name] = value
    fields = {}
    for name, value in values.items():
        text = value if isinstance(value, str) else json.dumps(value)
        if text not in ("", "null"):
            fields[name] = text
    return fields


def differences(golden: Fields, tot: Fields, under_test: Iterable[str] = ()) -> list[Fields]:
    """The fields that differ, the most serious first, as `{"field": "gpu", "golden": "MI300X", "tot": "MI355X", "kind":
    "machine"}`; "" for a side without the field. `under_test`: fields of kind `test`, beside those that a record names.

    Differences of machine and method count only if both sides name them, because a side may have no record.
    """
    kinds = {name: kind for kind, names in KINDS.items() for name in names}
    for record in (golden, tot):
        under_test = (*under_test, *record.get("under_test", "").split())
    kinds |= dict.fromkeys(under_test, "test")
    rows = []
    for name in dict.fromkeys((*golden, *tot)):
        kind = kinds.get(name, "other")
        old = golden.get(name, "")
        new = tot.get(name, "")
        is_one_sided = not old or not new
        if old == new or (is_one_sided and kind in ("machine", "method")):
            continue
        rows.append({"field": name, "golden": old, "tot": new, "kind": kind})
    return sorted(rows, key=lambda row: list(KINDS).index(row["kind"]))


def refuse_swapped_sides(golden: Sequence[Fields], tot: Sequence[Fields]) -> None:
    """Raise InputError if the records of one bench say that the golden side is its later `--env`."""
    for old, new in product(golden, tot):
        number = old.get("side", "")
        later = new.get("side", "")
        is_numbered = number.isdecimal() and later.isdecimal()
        if old.get("session") == new.get("session") and is_numbered and int(number) > int(later):
            raise InputError(
                f"the sides are swapped: in the bench {escaped(old.get('session', ''))} the golden side here"
                f" ({escaped(old.get('env', ''))}) was --env number {number}, and the tot side"
                f" ({escaped(new.get('env', ''))}) was number {later}. Give the file of the earlier --env first"
            )


def took_turns(golden: Sequence[Fields], tot: Sequence[Fields]) -> bool:
    """Return whether all records say that the two sides took turns in the same sessions."""
    sessions = _sessions(golden)
    return bool(sessions) and sessions == _sessions(tot) and all(order == "interleaved" for order, _ in sessions)


def _sessions(records: Sequence[Fields]) -> set[tuple[str | None, str]]:
    """(order, session) of each record."""
    return {(record.get("order"), record.get("session", "")) for record in records}
