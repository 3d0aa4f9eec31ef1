"""Candidates in specs (`only`, `refuted`, `confirmed`) and records (`candidate`, `withheld`): forms and checks.

A candidate's identity is a list of strings that only the tuner understands. Equal lists are the same candidate in every
process of an image. Across images, a candidate is the kernel of a table (TableKernel). `key` is the tuner's name for
the shape, and as opaque as an identity.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict, cast

from worker.protocol.records import ProtocolError, type_faults

Identity = tuple[str, ...]

MAX_BLOCKED = 64
"""Blocked candidates that a record lists; `withheld_more` counts the others."""
MAX_BLOCKED_BYTES = 40 * 1024
MAX_VERDICTS = 256
"""Entries of `refuted` and of `confirmed` in one spec."""
MAX_WORDS = 64
"""Strings of one identity or key."""
MAX_WORD = 400
"""Characters of each."""
BAD_ENDS = ("fault", "hang", "oom", "error")
SOURCES = ("attempt", "blocklist")
_TEXTS = {"name": 200, "detail": 300, "slot": 200, "image": 200, "driver": 100}
"""Characters of the texts of a blocked candidate."""
_BLOCKED_TYPES: dict[str, tuple[type, ...]] = {
    "key": (list,),
    "candidate": (list,),
    "outcome": (str,),
    "source": (str,),
    "t": (int, float),
    **dict.fromkeys(_TEXTS, (str,)),
}
_VERDICT_TYPES: dict[str, tuple[type, ...]] = {
    "family": (str,),
    "key": (list,),
    "candidate": (list,),
    "slot": (str,),
    "t": (int, float),
}


class BlockedRecord(TypedDict, total=False):
    """A candidate that an attempt did not measure because it faulted there, or did so before."""

    key: list[str]
    candidate: list[str]
    name: str
    """For display."""
    outcome: str
    """One of BAD_ENDS."""
    detail: str
    t: float
    """Time of the fault, epoch seconds."""
    slot: str
    """Stable id of the GPU where it faulted, else node and slot."""
    image: str
    driver: str
    source: str
    """`attempt`: it faulted in this attempt. `blocklist`: before, and was not measured now."""
    confirmed: bool
    """The fault was seen on a second slot: no evidence of one slot alone, so the attempt is complete without it."""


class TableKernel(NamedTuple):
    """A kernel as the cells of a table name it, which may be of another image: its kernelId may mean another one."""

    libtype: str
    number: str
    """kernelId."""
    name: str
    split: str
    """splitK; `0` if the table has none."""


def is_wanted(only: Sequence[TableKernel] | None, name: str, split: str | None = None) -> bool:
    """True if `only` has a kernel of this name and splitK (None: any), or if it is None and every one is wanted."""
    return only is None or any(kernel.name == name and split in (None, kernel.split) for kernel in only)


class BlockedVerdict(TypedDict, total=False):
    """Evidence from other slots on a blocked candidate of a node; `slot` and `t` are those of the node's entry."""

    family: str
    key: list[str]
    candidate: list[str]
    slot: str
    t: float


def identity(raw: Any, what: str = "candidate") -> Identity:
    """A list of strings as an identity. Raises ProtocolError; `what` names it there."""
    if not isinstance(raw, (list, tuple)) or not 0 < len(raw) <= MAX_WORDS:
        raise ProtocolError(f"{what} is not a list of 1 to {MAX_WORDS} strings")
    if not all(isinstance(word, str) and len(word) <= MAX_WORD for word in raw):
        raise ProtocolError(f"{what} holds more than strings of at most {MAX_WORD} characters")
    return tuple(raw)


def blocked_record(raw: Any) -> BlockedRecord:
    """One entry with all its fields, long texts cut. Raises ProtocolError."""
    if not isinstance(raw, Mapping):
        raise ProtocolError("a withheld candidate is not a mapping")
    known = {name: raw[name] for name in _BLOCKED_TYPES if name in raw}
    faults = type_faults(known, _BLOCKED_TYPES, ("key", "candidate"))
    if faults:
        raise ProtocolError(f"a withheld candidate: {faults[0]}")
    outcome = known.get("outcome", "fault")
    source = known.get("source", "attempt")
    t = known.get("t", 0.0)
    if outcome not in BAD_ENDS or source not in SOURCES or not 0 <= t <= 1e12:
        raise ProtocolError(f"a withheld candidate with outcome {outcome!r}, source {source!r}, time {t!r}")
    entry: dict[str, Any] = {}
    for name in ("key", "candidate"):
        entry[name] = list(identity(known[name], f"{name} of a withheld candidate"))
    for name, most in _TEXTS.items():
        entry[name] = known.get(name, "")[:most]
    entry |= {"outcome": outcome, "source": source, "t": round(float(t), 3)}
    entry["confirmed"] = raw.get("confirmed") is True
    return cast(BlockedRecord, entry)


def blocked_records(raw: Any, more: Any = 0) -> tuple[list[BlockedRecord], int]:
    """The entries that a record can hold, each candidate once, and how many more there are. Raises ProtocolError."""
    if not isinstance(raw, (list, tuple)):
        raise ProtocolError("withheld is not a list")
    if type(more) is not int or not 0 <= more < 2**31:
        raise ProtocolError("withheld_more is not a number")
    entries: dict[Identity, BlockedRecord] = {}
    for entry in map(blocked_record, raw):
        entries.setdefault(tuple(entry["candidate"]), entry)
    kept: list[BlockedRecord] = []
    size = 0
    for entry in entries.values():
        size += len(json.dumps(entry))
        if len(kept) == MAX_BLOCKED or size > MAX_BLOCKED_BYTES:
            break
        kept.append(entry)
    return kept, more + len(entries) - len(kept)


def check_kernels(only: Mapping[str, Any], shapes: Collection[str]) -> None:
    """Raises ProtocolError if a spec's `only` is not {shape id: [TableKernel as a mapping, ...]}."""
    for shape, kernels in only.items():
        what = f"only[{shape!r}]"
        if shape not in shapes:
            raise ProtocolError(f"{what} is not a shape of the spec")
        if not isinstance(kernels, list) or not kernels:
            raise ProtocolError(f"{what} is not a list of kernels")
        for kernel in kernels:
            if not isinstance(kernel, Mapping) or set(kernel) != set(TableKernel._fields):
                raise ProtocolError(f"{what} has a kernel that is not {{{', '.join(TableKernel._fields)}}}")
            identity(tuple(kernel.values()), f"a kernel of {what}")


def check_verdicts(name: str, entries: Sequence[Any]) -> None:
    """Raises ProtocolError if a spec's `refuted` or `confirmed` (`name`) is not a list of BlockedVerdict."""
    if len(entries) > MAX_VERDICTS:
        raise ProtocolError(f"{name} has more than {MAX_VERDICTS} entries")
    for i, entry in enumerate(entries):
        if not isinstance(entry, Mapping):
            raise ProtocolError(f"{name}[{i}] is not a mapping")
        faults = type_faults(entry, _VERDICT_TYPES, ("family", "key", "candidate"))
        if faults:
            raise ProtocolError(f"{name}[{i}]: {faults[0]}")
        for part in ("key", "candidate"):
            identity(entry[part], f"{name}[{i}].{part}")
