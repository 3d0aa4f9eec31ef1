"""Lines of nodes in a status: one a slot, or one a node where there are many slots, those that need a look first."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from orchestrator.cli.output.terminal import plain
from orchestrator.view.status import NodeStatus
from orchestrator.view.words import duration
from worker.text import plural

AWAY = ("unreachable", "slow")
"""States of a node without current data."""
MOST_SLOTS = 128
"""Number of slots above which a line is a node."""
MOST_NODES = 40
"""Number of nodes above which the others are summed up."""
_WELL = ("idle", "busy", "starting")


def by_node(nodes: Sequence[NodeStatus]) -> bool:
    """Return whether there are too many slots for a line each."""
    return sum(len(n.slots) for n in nodes) > MOST_SLOTS


def needs_look(node: NodeStatus) -> bool:
    """Return whether something is wrong with a node, a slot or a GPU of it."""
    if node.detail or node.state not in ("ready", "busy", "preparing", "ended"):
        return True
    return any(s.state not in _WELL or (s.gpu or {}).get("health", "ok") != "ok" for s in node.slots)


def node_row(node: NodeStatus) -> tuple[str, ...]:
    """Return the row of a node with all its slots, in the columns of `status_rows`."""
    sick = next((gpu_words(s.gpu) for s in node.slots if (s.gpu or {}).get("health", "ok") != "ok"), "")
    words = ": ".join(filter(None, (_counted(_slot_states([node])), node.detail)))
    name, n = plain(node.name), f"{len(node.slots)}x"
    return (name, n, plain(node.state, 40), str(node.tuned), str(node.failed), "", sick, plain(words))


def rest_words(nodes: Sequence[NodeStatus]) -> str:
    """Return `187 more nodes with 1,496 slots: 1,490 busy, 6 idle; 41,233 tuned, 3 failed`."""
    slots = sum(len(n.slots) for n in nodes)
    of = f"{plural(len(nodes), 'more node')} with {plural(slots, 'slot')}: {_counted(_slot_states(nodes))}"
    return f"{of}; {sum(n.tuned for n in nodes):,} tuned, {sum(n.failed for n in nodes):,} failed"


def _slot_states(nodes: Sequence[NodeStatus]) -> Counter[str]:
    return Counter(_state(n, s.state) for n in nodes for s in n.slots)


def _state(node: NodeStatus, slot: str) -> str:
    return node.state if node.state in (*AWAY, "draining", "preparing") else slot


def _counted(states: Counter[str]) -> str:
    return ", ".join(f"{n:,} {plain(state, 40)}" for state, n in states.most_common())


def status_rows(node: NodeStatus) -> list[tuple[str, ...]]:
    """Return a row per slot; the first one carries what concerns the node."""
    rows: list[tuple[str, ...]] = []
    for i, slot in enumerate(node.slots):
        state = _state(node, slot.state)
        since = duration(time.time() - slot.since) if slot.attempt and slot.since else ""
        name, tuned, failed = (plain(node.name), str(node.tuned), str(node.failed)) if i == 0 else ("", "", "")
        doing = doing_words(node, i)
        doing = plain(doing) if doing == node.detail else plain(doing, 160)
        rows.append((name, slot.slot, plain(state, 40), tuned, failed, since, gpu_words(slot.gpu), doing))
    return rows or [(plain(node.name), "", node.state, str(node.tuned), str(node.failed), "", "", plain(node.detail))]


def gpu_words(gpu: dict[str, Any] | None) -> str:
    """Return `97 %, 12/288 GiB, 68 C`, a fault first; "" where nothing is known."""
    if not gpu:
        return ""
    parts = [] if gpu["health"] == "ok" else [f"! {gpu['health']}"]
    parts += [f"{gpu['use_pct']:.0f} %"] if "use_pct" in gpu else []
    if gpu.get("memory_total"):
        parts.append(f"{gpu.get('memory_used', 0) / 2**30:.0f}/{gpu['memory_total'] / 2**30:.0f} GiB")
    if gpu.get("temperature_c"):
        parts.append(f"{max(gpu['temperature_c'].values()):.0f} C")
    return plain(", ".join(parts), 60)


def doing_words(node: NodeStatus, i: int) -> str:
    """Return what slot number `i` measures, or why its node does not answer."""
    detail = node.detail if i == 0 else ""
    return (detail or node.slots[i].doing) if node.state in AWAY else (node.slots[i].doing or detail)
