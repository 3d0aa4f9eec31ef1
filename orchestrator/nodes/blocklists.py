"""Blocklists of nodes, candidate kernels that crashed or hung their process: read and emptied over each transport.

They lie in what outlives a run on a node, beside the modules that were built (docs/explanation/aiter.md): one list an
image and chip. Needs no Python on the node.
"""

from __future__ import annotations

import posixpath
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.dispatch.deploy import NodePlan
from orchestrator.errors import OrchestratorError, TransportError
from orchestrator.inventory import Inventory
from orchestrator.ledger import clean
from orchestrator.nodes.link import transport_of
from orchestrator.nodes.plan import plan_nodes
from orchestrator.tables.write import utc
from orchestrator.transport import connected
from worker.protocol.blocklist import EXPIRES_S, MAX_BYTES, BlocklistEntry, current_entries

MAX_PARALLEL = 32
MARK = "#gemmfleet-list"
_READ = f"""\
cd -- "$1" 2>/dev/null || exit 0
for f in aiter/*/blocklist.jsonl; do
    [ -f "$f" ] && [ ! -L "$f" ] || continue
    printf '\\n%s\\n' '{MARK}'
    head -c {MAX_BYTES} -- "$f" || exit
done
exit 0
"""
_CLEAR = """\
cd -- "$1" 2>/dev/null || exit 0
for f in aiter/*/blocklist.jsonl; do
    [ -f "$f" ] && [ ! -L "$f" ] || continue
    rm -f -- "$f" || exit
done
"""


@dataclass(frozen=True, slots=True)
class NodeList:
    """Blocklist of a node; `fault`: why it could not be read."""

    node: str
    entries: tuple[BlocklistEntry, ...] = ()
    fault: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"name": self.node, "fault": self.fault, "entries": [entry_json(e) for e in self.entries]}


def state(entry: BlocklistEntry, now: float) -> str:
    """Slots that leave the candidate out: all slots of image and driver, its own slot, or nobody any more."""
    if not entry.canary:
        return "not used"  # it was seen within a group, or the slot did not prove healthy after it
    if entry.confirmed:
        return "confirmed"
    return "expired" if now - entry.t >= EXPIRES_S else "this slot"


def entry_json(entry: BlocklistEntry) -> dict[str, Any]:
    """An entry with clean texts."""
    raw = entry.as_json()
    texts = {k: clean.text(str(raw[k]), 300) for k in ("slot", "image", "driver", "gfx", "family", "outcome", "detail")}
    date = utc(entry.t) if 0 <= entry.t < 1e11 else ""
    lists = {k: [clean.text(w, 400) for w in raw[k][:64]] for k in ("key", "candidate")}
    known = {"name": clean.text(raw["named"], 300), "date": date, "used": state(entry, time.time())}
    return {**texts, **lists, **known, "confirmed": entry.confirmed}


def blocklists(inventory: Inventory, runs: Path, *, clear: bool, accept_new_host_keys: bool = False) -> list[NodeList]:
    """Blocklists of all nodes, in the inventory's order; `clear` empties them. `runs`: folder of local nodes' runs."""
    plans = plan_nodes(inventory, "blocklist", runs.absolute() / "blocklist", {})

    def ask(plan: NodePlan) -> NodeList:
        try:
            return NodeList(plan.node, _ask(plan, clear, accept_new_host_keys))
        except OrchestratorError as e:
            return NodeList(plan.node, fault=e.reason)

    with ThreadPoolExecutor(max(1, min(MAX_PARALLEL, len(plans))), "blocklist") as pool:
        return list(pool.map(ask, plans))


def _ask(plan: NodePlan, clear: bool, accept_new_host_keys: bool) -> tuple[BlocklistEntry, ...]:
    cache = posixpath.normpath(f"{plan.folder}/{plan.cache}")
    with connected(transport_of(plan, accept_new_host_keys=accept_new_host_keys)) as transport:
        done = transport.run(["sh", "-c", _READ, "sh", cache])
        if clear and done.code == 0:
            done_too = transport.run(["sh", "-c", _CLEAR, "sh", cache])
            done = done if done_too.code == 0 else done_too
        if done.code != 0:
            raise TransportError(plan.node, f"its blocklists in {cache} cannot be used: {clean.text(done.text, 300)}")
    return tuple(sorted(_entries(done.out.decode(errors="replace").splitlines()), key=lambda e: e.t))


def _entries(lines: Iterable[str]) -> list[BlocklistEntry]:
    """Each list by itself: a word in one says nothing about another's entries."""
    lists: list[list[str]] = []
    for line in lines:
        if line.startswith(MARK):
            lists.append([])
        elif lists:
            lists[-1].append(line)
    return [e for one in lists for e in current_entries(one)]
