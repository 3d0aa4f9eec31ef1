"""Candidates in specs and records: those to be measured (`only`), those left out (`withheld`).

A candidate's identity is a list of strings that only the tuner understands; equal lists are the same candidate in every
process of an image. Across images a candidate is the kernel of a table (TableKernel). `key` is the shape as the tuner
names it, as opaque as an identity.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

from worker.protocol.records import ProtocolError, type_faults

Identity = tuple[str, ...]

MAX_WITHHELD = 64  # withheld candidates that a record lists; how many more there are is `withheld_more`
MAX_WITHHELD_BYTES = 40 * 1024
MAX_VERDICTS = 256  # entries of `refuted` and of `confirmed` in one spec
MAX_WORDS, MAX_WORD = 64, 400  # limits of one identity or key: strings, and characters of each
BAD_ENDS = ("fault", "hang", "oom", "error")
SOURCES = ("attempt", "blocklist")
_TEXTS = {"name": 200, "detail": 300, "slot": 200, "image": 200, "driver": 100}


class Withheld(TypedDict, total=False):
    """A candidate that an attempt did not measure because it faulted there, or did so before."""

    key: list[str]
    candidate: list[str]
    name: str  # name for display
    outcome: str  # one of BAD_ENDS
    detail: str
    t: float  # time of the fault, epoch seconds
    slot: str  # stable id of the GPU where it faulted, else node and slot
    image: str
    driver: str
    source: str  # `attempt`: it faulted in this attempt. `blocklist`: before, and was left out.
    # the fault was seen on a second slot: no evidence of one slot alone, so the attempt is complete without it
    confirmed: bool


class TableKernel(NamedTuple):
    """A kernel as the cells of a table name it, which may be of another image: its kernelId may mean another one."""

    libtype: str
    number: str
    name: str
    split: str  # splitK; `0` where the table has none


def is_wanted(only: Sequence[TableKernel] | None, name: str, split: str | None = None) -> bool:
    """True if `only` has a kernel of this name and splitK (None: any), or if it is None and every one is wanted."""
    return only is None or any(k.name == name and split in (None, k.split) for k in only)


class BlocklistVerdict(TypedDict, total=False):
    """Evidence from other slots on an entry of a node's blocklist; `slot` and `t` are the entry's own."""

    family: str
    key: list[str]
    candidate: list[str]
    slot: str
    t: float


def identity(raw: Any, what: str = "candidate") -> Identity:
    """A list of strings as an identity. Raises ProtocolError."""
    if not isinstance(raw, (list, tuple)) or not 0 < len(raw) <= MAX_WORDS:
        raise ProtocolError(f"{what} is not a list of 1 to {MAX_WORDS} strings")
    if not all(isinstance(word, str) and len(word) <= MAX_WORD for word in raw):
        raise ProtocolError(f"{what} holds more than strings of at most {MAX_WORD} characters")
    return tuple(raw)


def withheld_entry(raw: Any) -> Withheld:
    """One entry with all its fields, long texts cut. Raises ProtocolError."""
    if not isinstance(raw, Mapping):
        raise ProtocolError("a withheld candidate is not a mapping")
    entry = Withheld(
        key=list(identity(raw.get("key"), "key of a withheld candidate")),
        candidate=list(identity(raw.get("candidate"), "a withheld candidate")),
    )
    for name, most in _TEXTS.items():
        value = raw.get(name, "")
        if not isinstance(value, str):
            raise ProtocolError(f"{name} of a withheld candidate is {type(value).__name__}, not str")
        entry[name] = value[:most]  # type: ignore[literal-required]
    entry["outcome"], entry["source"] = raw.get("outcome", "fault"), raw.get("source", "attempt")
    if entry["outcome"] not in BAD_ENDS or entry["source"] not in SOURCES:
        raise ProtocolError(f"a withheld candidate with outcome {entry['outcome']!r}, source {entry['source']!r}")
    t = raw.get("t", 0.0)
    if isinstance(t, bool) or not isinstance(t, (int, float)) or not 0 <= t <= 1e12:
        raise ProtocolError("a withheld candidate without a time")
    entry["t"] = round(float(t), 3)
    entry["confirmed"] = raw.get("confirmed", False) is True
    return entry


def withheld_list(raw: Any, more: Any = 0) -> tuple[list[Withheld], int]:
    """The entries that a record can hold, each candidate once, and how many more there are. Raises ProtocolError."""
    if not isinstance(raw, (list, tuple)):
        raise ProtocolError("withheld is not a list")
    if type(more) is not int or not 0 <= more < 2**31:
        raise ProtocolError("withheld_more is not a number")
    known: dict[Identity, Withheld] = {}
    for entry in map(withheld_entry, raw):
        known.setdefault(tuple(entry["candidate"]), entry)
    kept: list[Withheld] = []
    size = 0
    for entry in known.values():
        size += len(json.dumps(entry))
        if len(kept) == MAX_WITHHELD or size > MAX_WITHHELD_BYTES:
            break
        kept.append(entry)
    return kept, more + len(known) - len(kept)


def only_faults(raw: Mapping[str, Any], shapes: Iterable[int]) -> list[str]:
    """Faults of a spec's `only`: shape id (as text) -> a list of TableKernels as mappings."""
    ids = {str(s) for s in shapes}
    out = [f"only[{shape!r}] is no shape of the spec" for shape in raw if shape not in ids]
    for shape, kernels in raw.items():
        what = f"only[{shape!r}]"
        if not isinstance(kernels, list) or not kernels:
            out.append(f"{what} is not a list of kernels")
        elif not all(isinstance(k, Mapping) and set(k) == set(TableKernel._fields) for k in kernels):
            out.append(f"{what} has a kernel that is not {{{', '.join(TableKernel._fields)}}}")
        else:
            out += [fault for k in kernels if (fault := _identity_fault(tuple(k.values()), f"a kernel of {what}"))]
    return out


_VERDICT_TYPES: dict[str, tuple[type, ...]] = {
    "family": (str,), "key": (list,), "candidate": (list,), "slot": (str,), "t": (int, float),
}  # fmt: skip


def verdict_faults(raw: Sequence[Any], name: str) -> list[str]:
    """Faults of a spec's `refuted` or `confirmed`."""
    if len(raw) > MAX_VERDICTS:
        return [f"{name} has more than {MAX_VERDICTS} entries"]
    out: list[str] = []
    for i, entry in enumerate(raw):
        if not isinstance(entry, Mapping):
            out.append(f"{name}[{i}] is not a mapping")
        elif faults := type_faults(entry, _VERDICT_TYPES, ("family", "key", "candidate")):
            out += [f"{name}[{i}]: {fault}" for fault in faults]
        else:
            out += [fault for k in ("key", "candidate") if (fault := _identity_fault(entry[k], f"{name}[{i}].{k}"))]
    return out


def _identity_fault(raw: Any, what: str) -> str:
    try:
        identity(raw, what)
    except ProtocolError as e:
        return str(e)
    return ""
