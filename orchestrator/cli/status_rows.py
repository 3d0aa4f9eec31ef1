"""Rows of the status of nodes and slots, which `status` prints and the live view draws.

A row is a slot, or a node if there are many slots; nodes that need a look come first. Texts are safe for a terminal.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from orchestrator.cli.printer import plain
from orchestrator.view.formatting import duration
from orchestrator.view.status import NodeStatus, SlotStatus
from worker.text import plural

AWAY = ("unreachable", "slow")
"""States of a node without current data."""
NODE_WIDE = (*AWAY, "draining", "preparing")
"""States of a node that say more about its slots than the slots' own states."""
WELL = ("idle", "busy", "starting")
"""States of a slot that need no look."""
MOST_SLOTS = 128
"""Number of slots above which a row is a node."""
WIDEST_STATE = 40
WIDEST_DOING = 160
WIDEST_GPU = 60


class StatusRow(NamedTuple):
    """A row, as text: `n1 | 0 | busy | 12 | 1 | 4 s | 97 %, 12/288 GiB, 68 C | 16x1280x8192  (g0001-1)`.

    `since`: how long it measures its shape. `doing`: the shape, or what is wrong with the node.
    """

    name: str
    slot: str
    state: str
    tuned: str
    failed: str
    since: str
    gpu: str
    doing: str


def shows_nodes(nodes: Sequence[NodeStatus]) -> bool:
    """Return whether there are too many slots for a row each."""
    return sum(len(node.slots) for node in nodes) > MOST_SLOTS


def needs_look(node: NodeStatus) -> bool:
    """Return whether something is wrong with a node, a slot or a GPU of it."""
    if node.detail or node.state not in ("ready", "busy", "preparing", "ended"):
        return True
    return any(slot.state not in WELL or _is_sick(slot) for slot in node.slots)


def _is_sick(slot: SlotStatus) -> bool:
    return slot.gpu is not None and slot.gpu.get("health", "ok") != "ok"


def node_row(node: NodeStatus) -> StatusRow:
    """Return the row of a node with all its slots; its GPU is the first one with a fault."""
    gpu = next((describe_gpu(slot.gpu) for slot in node.slots if _is_sick(slot)), "")
    states = _count_states([node])
    doing = ": ".join(text for text in (states, node.detail) if text)
    return StatusRow(
        name=plain(node.name),
        slot=f"{len(node.slots)}x",
        state=plain(node.state, WIDEST_STATE),
        tuned=str(node.tuned),
        failed=str(node.failed),
        since="",
        gpu=gpu,
        doing=plain(doing),
    )


def describe_rest(nodes: Sequence[NodeStatus]) -> str:
    """Return `187 more nodes with 1,496 slots: 1,490 busy, 6 idle; 41,233 tuned, 3 failed`."""
    slots = plural(sum(len(node.slots) for node in nodes), "slot")
    tuned = sum(node.tuned for node in nodes)
    failed = sum(node.failed for node in nodes)
    counts = f"{_count_states(nodes)}; {tuned:,} tuned, {failed:,} failed"
    return f"{plural(len(nodes), 'more node')} with {slots}: {counts}"


def _state_of(node: NodeStatus, slot: SlotStatus) -> str:
    return node.state if node.state in NODE_WIDE else slot.state


def _count_states(nodes: Sequence[NodeStatus]) -> str:
    """Return `7 busy, 1 quarantined`, the most common state first."""
    states = Counter(_state_of(node, slot) for node in nodes for slot in node.slots)
    return ", ".join(f"{n:,} {plain(state, WIDEST_STATE)}" for state, n in states.most_common())


def slot_rows(node: NodeStatus) -> list[StatusRow]:
    """Return a row per slot; the first one carries what concerns the node."""
    if not node.slots:
        counts = (str(node.tuned), str(node.failed))
        return [StatusRow(plain(node.name), "", node.state, *counts, "", "", plain(node.detail))]
    rows: list[StatusRow] = []
    for slot in node.slots:
        is_first = not rows
        rows.append(
            StatusRow(
                name=plain(node.name) if is_first else "",
                slot=slot.slot,
                state=plain(_state_of(node, slot), WIDEST_STATE),
                tuned=str(node.tuned) if is_first else "",
                failed=str(node.failed) if is_first else "",
                since=duration(time.time() - slot.since) if slot.attempt and slot.since else "",
                gpu=describe_gpu(slot.gpu),
                doing=_describe_doing(node, slot, node.detail if is_first else ""),
            )
        )
    return rows


def _describe_doing(node: NodeStatus, slot: SlotStatus, detail: str) -> str:
    """Return the shape of a slot, or the detail of its node. Of a node that is away the detail says more."""
    doing = (detail or slot.doing) if node.state in AWAY else (slot.doing or detail)
    return plain(doing) if doing == node.detail else plain(doing, WIDEST_DOING)


def describe_gpu(gpu: dict[str, Any] | None) -> str:
    """Return `97 %, 12/288 GiB, 68 C`, a fault first; "" where nothing is known."""
    if not gpu:
        return ""
    parts = []
    if gpu["health"] != "ok":
        parts.append(f"! {gpu['health']}")
    if "use_pct" in gpu:
        parts.append(f"{gpu['use_pct']:.0f} %")
    if gpu.get("memory_total"):
        parts.append(f"{gpu.get('memory_used', 0) / 2**30:.0f}/{gpu['memory_total'] / 2**30:.0f} GiB")
    if gpu.get("temperature_c"):
        parts.append(f"{max(gpu['temperature_c'].values()):.0f} C")
    return plain(", ".join(parts), WIDEST_GPU)
