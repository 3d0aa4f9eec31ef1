"""Warnings about a run's AITERs: kinds of candidate that no slot tried, and images that are not promised to work.

The workers name both when their tuner is ready (worker/tuners/aiter/findings.py). The kinds that the files of an image
have for these shapes are held against the rows. One image and chip counts as a whole: a kind that any slot tried is
not missing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.ledger.reader import LedgerReader
from worker.families import backend_of
from worker.text import plural

_TRIED = "SELECT DISTINCT shape, node, slot, libtype FROM rows"
_UNNAMED = "SELECT DISTINCT kernel_name, kernel_id FROM rows WHERE shape=? AND node=? AND slot=? AND libtype=''"


@dataclass(slots=True)
class _Image:
    """Kinds that one image and chip should have, and those it tried, by shape."""

    expected: Mapping[str, Sequence[str]]
    gfx: str
    nodes: list[str] = field(default_factory=list)
    tried: dict[int, set[str]] = field(default_factory=dict)


def untried_kinds(ledger: LedgerReader) -> list[str]:
    """A sentence for each kind that is missing altogether on an image and chip."""
    images: dict[str, _Image] = {}
    of: dict[tuple[str, str], _Image] = {}
    for slot in ledger.slots():
        facts = slot.device.get("aiter")
        if not isinstance(facts, dict) or not _are_kinds(facts.get("kinds")):
            continue
        gfx = str(slot.device.get("gfx"))
        name = json.dumps([facts.get("key"), gfx, facts["kinds"]], sort_keys=True)
        image = images.setdefault(name, _Image(facts["kinds"], gfx))
        image.nodes += [slot.node] if slot.node not in image.nodes else []
        of[slot.node, slot.slot] = image
    if not images:
        return []
    family = ledger.family.name
    for shape, node, number, libtype in ledger.query(_TRIED):
        found = of.get((node, number))
        if found is not None:
            kinds = found.tried.setdefault(shape, set())
            if libtype:
                kinds.add(libtype)
            else:
                for kernel, kernel_id in ledger.query(_UNNAMED, (shape, node, number)):
                    kinds.add(
                        backend_of(family, {"kernelName": kernel, "kernelId": "" if kernel_id is None else kernel_id})
                    )
    names = ledger.family.key_names
    keys = {shape: dict(zip(names, ledger.key(shape), strict=True)) for i in images.values() for shape in i.tried}
    return [words for image in images.values() for words in _missing(image, keys)]


def unpromised(ledger: LedgerReader) -> list[str]:
    """A sentence for each AITER that gemmfleet does not promise to drive, with its nodes."""
    nodes: dict[str, list[str]] = {}
    for slot in ledger.slots():
        facts = slot.device.get("aiter")
        text = facts.get("warning") if isinstance(facts, dict) else None
        if isinstance(text, str) and text and slot.node not in nodes.setdefault(text, []):
            nodes[text].append(slot.node)
    return [f"{', '.join(names)}: {text}" for text, names in nodes.items()]


def _missing(image: _Image, keys: Mapping[int, Mapping[str, int | str]]) -> list[str]:
    out = []
    for kind, conditions in image.expected.items():
        shapes = [s for s in image.tried if all(holds(c, keys[s]) for c in conditions)]
        if shapes and not any(kind in image.tried[s] for s in shapes):
            where = f" ({', '.join(conditions)})" if conditions else ""
            count = plural(len(shapes), "shape")
            out.append(
                f"no {kind} candidate was tried in {count}{where} on {', '.join(image.nodes)}, though the files of its "
                f"AITER have such kernels for {image.gfx}: winners may not be the best; see GPU_ARCHS in the "
                "inventory's env:, and what the tuner's log says of lists of kernels"
            )
    return out


def holds(condition: str, key: Mapping[str, int | str]) -> bool:
    """True where a shape meets `COLUMN % N,...` or `COLUMN = VALUE,...`; one of another form holds for none."""
    column, sign, rest = ([*condition.split(" ", 2), "", ""])[:3]
    values, cell = rest.split(","), key.get(column)
    if cell is None or sign not in ("%", "="):
        return False
    if sign == "=":
        return str(cell) in values
    return any(v.isdigit() and int(v) and int(cell) % int(v) == 0 for v in values)


def _are_kinds(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(c, list) and all(isinstance(w, str) for w in c) for c in value.values()
    )
