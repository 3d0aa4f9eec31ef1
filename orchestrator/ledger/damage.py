"""Finds the damaged value of a ledger whose file SQLite can read: edited by hand, or written by a failing disk.

LedgerReader calls `find_damage` only after a command broke on what it had read. So a good ledger costs nothing, a
damaged one ends in a sentence, and an error of our own, for which no value is to blame, keeps its traceback.

The search holds every value to the form that its writer gives it. A new value of the run goes into _META, and a new
JSON column into the table in `_damage`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from math import isfinite
from typing import Any, Protocol

from orchestrator import events as ev
from orchestrator.errors import OrchestratorError
from orchestrator.ledger.database import HAS_POINTS
from orchestrator.policy.apply import apply
from orchestrator.policy.model import State
from orchestrator.policy.settings import PolicySettings
from orchestrator.reasons import Reason
from worker.families import Family
from worker.triton_configs.point_record import PointRecord

BROKEN_BY_VALUES = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""The errors that Python raises over a value that is not as expected."""
_NUMBER = (int, float)
_META: dict[str, Any] = {
    "state": str, "family": str, "tuner": str, "controller": str, "epoch": int, "units": _NUMBER, "created": _NUMBER,
    "ended": _NUMBER, "cost": dict, "farewell": dict, "worths": dict,
}  # fmt: skip
_PLAIN: dict[str, Any] = {"str": str, "bool": bool, "int": int, "float": _NUMBER, "Reason": Reason}


class OpenLedger(Protocol):
    """The part of a ledger that the search needs: a `LedgerReader`, which calls `find_damage` when a reading broke."""

    def query(self, sql: str) -> list[Any]:
        """The rows of a query. Raises LedgerError if SQLite cannot read them."""

    @property
    def family(self) -> Family:
        """The run's family. Raises OrchestratorError if the value of the run names none."""


def find_damage(ledger: OpenLedger) -> str:
    """A sentence on the first damaged value, "" if there is none."""
    try:
        return next(_damage(ledger), "")
    except OrchestratorError as e:
        return str(e)


def _damage(ledger: OpenLedger) -> Iterator[str]:
    """A sentence on each damaged value, in the order of the tables."""
    for key, text in ledger.query("SELECT key, value FROM meta"):
        yield from _fault(f"value `{key}`", text, partial(is_value, key))
    for (table,) in ledger.query(
        "SELECT name FROM pragma_table_list WHERE type='table' AND NOT strict AND name NOT GLOB 'sqlite_*'"
    ):
        yield f"table {table} was made again without the types of its columns"
    family = ledger.family
    for id_, text in ledger.query("SELECT id, key FROM shapes"):
        yield from _fault(f"key of shape {id_}", text, partial(is_key, family))
    yield from _journal_damage(ledger)
    for table, place, columns in (
        ("reports", "attempt", {"spent": _is_seconds, "device": _is_object, "conditions": _is_object_of_objects}),
        ("rows", "id", {"extra": _is_object}),
        ("slots", "node || '/' || slot", {"info": _is_object, "device": _is_object}),
        ("withheld", "attempt || ' ' || shape", {"candidate": _is_names, "entry": _is_entry}),
    ):
        for column, is_right in columns.items():
            sql = f"SELECT {place}, {column} FROM {table} WHERE {column} IS NOT NULL"
            for where, text in ledger.query(sql):
                yield from _fault(f"`{column}` of {table} {where}", text, is_right)
    if ledger.query(HAS_POINTS):
        for id_, text in ledger.query("SELECT id, point FROM points"):
            yield from _fault(f"measured point {id_}", text, _is_point)
    for condition, fault in (
        ("shape NOT IN (SELECT id FROM shapes)", "is of no shape of this run"),
        ("winner AND (us IS NULL OR us <= 0 OR us > 1e300)", "is a winner without a time"),
    ):
        for (id_,) in ledger.query(f"SELECT id FROM rows WHERE {condition}"):
            yield f"row {id_} {fault}"


def _journal_damage(ledger: OpenLedger) -> Iterator[str]:
    """The records in their order, each held to its type and replayed."""
    state = State(PolicySettings())
    for number, t, kind, data in ledger.query("SELECT id, t, type, data FROM journal ORDER BY id"):
        try:
            record = ev.from_json(kind, data)
            wrong = [f.name for f in fields(record) if not _has_type(getattr(record, f.name), str(f.type))]
            if wrong:
                raise TypeError(f"{', '.join(wrong)}: not of its type")
            apply(state, record, t)
            time.localtime(t)
        except BROKEN_BY_VALUES as e:
            yield f"journal record {number} ({kind[:40]}) cannot be used ({type(e).__name__}: {str(e)[:200]})"
    for (shape,) in ledger.query("SELECT id FROM shapes WHERE id IN (SELECT shape FROM rows)"):
        if shape not in state.shapes:
            yield f"shape {shape} has rows, and the journal does not name it"
    known = {id_ for (id_,) in ledger.query("SELECT id FROM shapes")}
    for shape in sorted(set(state.shapes) - known):
        yield f"shape {str(shape)[:40]} of the journal has no key"


def _has_type(value: Any, annotation: str) -> bool:
    """Return whether a field of a record has its type, by the annotation as it is written in events.py."""
    if annotation.endswith(" | None"):
        return value is None or _has_type(value, annotation.removesuffix(" | None"))
    if annotation.startswith("tuple"):
        return isinstance(value, tuple)
    return _is_a(_PLAIN[annotation], value) and (isinstance(value, bool) == (annotation == "bool"))


def _fault(what: str, text: str, is_right: Callable[[Any], bool]) -> Iterator[str]:
    """A sentence if the text is not JSON, or its value is not right. `what`: its name in the sentence."""
    try:
        is_sound = is_right(json.loads(text))
    except BROKEN_BY_VALUES:
        is_sound = False
    if not is_sound:
        yield f"{what} is {str(text)[:60]!r}"


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_object_of_objects(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(v, dict) for v in value.values())


def _is_seconds(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_a(_NUMBER, v) for v in value.values())


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, str) for v in value)


def is_value(key: str, value: Any) -> bool:
    """Return whether a value of the run, such as `ended`, has its type."""
    return _is_a(_META.get(key, object), value)


def is_key(family: Family, value: Any) -> bool:
    """Return whether a value has the types of the family's key columns."""
    kinds = [int if column.kind == "int" else str for column in family.columns]
    return isinstance(value, list) and len(value) == len(kinds) and all(map(isinstance, value, kinds))


def _is_a(kind: Any, value: Any) -> bool:
    """Return whether the value is of a type, or one of several types, and no infinite number."""
    return isinstance(value, kind) and (not isinstance(value, float) or isfinite(value))


def _is_point(value: Any) -> bool:
    return bool(PointRecord.from_document(value))


def _is_entry(value: Any) -> bool:
    return isinstance(value, dict) and {"key", "slot", "image", "driver", "t"} <= set(value)
