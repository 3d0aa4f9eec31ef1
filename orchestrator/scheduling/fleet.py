"""Nodes and slots with the work queued on each, in sums that make the next choice O(log nodes).

`refresh` recomputes a node's sums from its slots (about eight at most) after each change to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from orchestrator.scheduling.book import KeyedHeap
from orchestrator.scheduling.model import Attempt, Node, Slot, SlotId


class Fleet:
    """Bookkeeping only. `by_load`: nodes that may get work, idlest first; `by_spare`: nodes from which work may be
    taken back, fullest first."""

    def __init__(self, groups_ahead: int) -> None:
        self._groups_ahead = groups_ahead
        self.nodes: dict[str, Node] = {}
        self._on_host: dict[str, list[Node]] = {}
        self.gpus: dict[SlotId, SlotId] = {}
        """(node, slot) -> (host, id of the GPU), where the node has reported them."""
        self._as: dict[SlotId, list[SlotId]] = {}
        """(host, id of the GPU) -> each (node, slot) that it was, the first of which stands for it in all evidence."""
        self.by_load = KeyedHeap()
        self.by_spare = KeyedHeap()
        self.usable: dict[str, None] = {}
        """Nodes with a slot that takes work, or soon will."""
        self.ahead_s = 0.0
        self.free = 0
        """Slots that have nothing to do and nothing coming."""
        self.hopeful = 0
        self.clean = 0
        """Ready slots with some trust ..."""
        self.proven = 0
        """... and with all of it."""
        self.taking = 0
        self.running = 0

    def add(self, node: str, host: str) -> Node:
        """Add a node that is not known yet. `host`: its machine, "" where that is the node itself."""
        n = self.nodes[node] = Node(node, len(self.nodes), host or node)
        self._on_host.setdefault(n.host, []).append(n)
        return n

    def locate(self, n: Node, host: str, slots: Sequence[str], gpus: Sequence[str]) -> None:
        """Take in the node's machine and GPUs. A GPU that was known as a slot of another node keeps its evidence, and
        its quarantine."""
        if host and n.host == n.name != host:
            self._on_host[n.host].remove(n)
            n.host = host
            self._on_host.setdefault(host, []).append(n)
        for name, gpu in zip(slots, gpus, strict=False):
            here = (n.name, name)
            if here in self.gpus:
                continue
            self.gpus[here] = (n.host, gpu)
            known = self._as.setdefault((n.host, gpu), [])
            known.append(here)
            slot, first = n.slots[name], self.slot(*known[0])
            if first is not None and first is not slot:
                slot.health = first.health
                if slot.health.closed:
                    slot.state, slot.why = "quarantined", slot.health.closed

    def place(self, node: str, slot: str) -> SlotId:
        """Identity of the slot in evidence: the same for each node that has, or had, its GPU."""
        gpu = self.gpus.get((node, slot))
        return self._as[gpu][0] if gpu is not None else (node, slot)

    def names(self, place: SlotId) -> list[SlotId]:
        """Each (node, slot) that the place is or was."""
        gpu = self.gpus.get(place)
        return self._as[gpu] if gpu is not None else [place]

    def live(self, place: SlotId) -> list[SlotId]:
        """Those of its names whose node is not gone."""
        return [p for p in self.names(place) if p[0] in self.nodes and self.nodes[p[0]].state != "gone"]

    def spot(self, place: SlotId) -> str:
        """The place in words: its host and GPU, where these are not node and slot."""
        host, gpu = self.gpus.get(place, place)
        return f"{place[0]} slot {place[1]}" if (host, gpu) == place else f"{host} GPU {gpu}"

    def host(self, node: str) -> str:
        """The machine that a node is, or was, on."""
        n = self.nodes.get(node)
        return n.host if n is not None else node

    def on_hosts(self, hosts: Iterable[str]) -> list[Node]:
        """The nodes on these machines."""
        return [n for h in hosts for n in self._on_host.get(h, ())]

    def slot(self, node: str, slot: str) -> Slot | None:
        n = self.nodes.get(node)
        return n.slots.get(slot) if n is not None else None

    # --- an attempt's way ---------------------------------------------------------------------------------------------

    def sent(self, a: Attempt) -> None:
        n = self.nodes[a.node]
        n.used = True
        n.outstanding[a.id] = None
        n.careful += a.careful
        if a.exclusive:
            n.exclusive = a.id
        self._wait(n, a)
        self.refresh(n)

    def take(self, a: Attempt) -> None:
        """Mark the attempt as being taken back: it no longer counts as queued there."""
        n = self.nodes[a.node]
        self._unwait(n, a)
        a.taking = True
        self.taking += 1
        self.refresh(n)

    def claim(self, a: Attempt, slot: str | None) -> None:
        """Mark the attempt as claimed; `slot` None where it is not known by which worker."""
        n = self.nodes[a.node]
        self._unwait(n, a)
        self._untake(a)
        if a.state == "claimed":
            n.claimed -= 1
        a.at = slot
        a.state = "claimed" if slot is None else "started"
        if slot is None:
            n.claimed += 1
        elif slot in n.slots:
            n.slots[slot].running, n.slots[slot].adrift = a.id, None
            n.slots[slot].checking = False
        self.refresh(n)

    def close(self, a: Attempt, *, lost: bool = False) -> None:
        n = self.nodes[a.node]
        self._unwait(n, a)
        self._untake(a)
        if a.state == "claimed":
            n.claimed -= 1
        a.state, a.lost = "over", lost
        n.outstanding.pop(a.id, None)
        if a.careful:
            self.settled_suspects(a)
        if n.exclusive == a.id:
            n.exclusive = None
        self.release(a)
        self.refresh(n)

    def release(self, a: Attempt) -> None:
        """Free the slot that ran the attempt."""
        n = self.nodes[a.node]
        slot = n.slots.get(a.at or "")
        if slot is not None and slot.adrift == a.id:
            slot.adrift = None
        if slot is not None and slot.running == a.id:
            slot.running = None
            self.refresh(n)

    def settled_suspects(self, a: Attempt) -> None:
        """Mark the attempt as one without unsettled shapes that had a loss."""
        a.careful = False
        self.nodes[a.node].careful -= 1

    def _wait(self, n: Node, a: Attempt) -> None:
        n.unclaimed[a.id] = None
        n.ahead_s += a.cost_s
        if a.slot is None:
            n.anyone += 1
        elif a.slot in n.slots:
            n.slots[a.slot].named += 1

    def _unwait(self, n: Node, a: Attempt) -> None:
        if a.id not in n.unclaimed:
            return
        del n.unclaimed[a.id]
        n.ahead_s = n.ahead_s - a.cost_s if n.unclaimed else 0.0
        if a.slot is None:
            n.anyone -= 1
        elif a.slot in n.slots:
            n.slots[a.slot].named -= 1

    def _untake(self, a: Attempt) -> None:
        if a.taking:
            a.taking = False
            self.taking -= 1

    # --- sums ---------------------------------------------------------------------------------------------------------

    def refresh(self, n: Node) -> None:
        """Recompute the node's sums."""
        ready = hopeful = clean = proven = bare = spare = running = 0
        for s in n.slots.values():
            running += s.running is not None
            if s.state == "ready":
                ready += 1
                clean += not s.health.streak
                proven += s.health.proven
                if s.running is None and not s.checking:
                    bare += not s.named
                    spare += max(0, s.named - 1)
                    continue
            elif s.state == "starting":
                hopeful += 1
            spare += s.named
        bare = max(0, bare - n.claimed)
        spare += max(0, n.anyone - bare)
        takes = n.state in ("joined", "away") and not n.draining
        is_open = takes and n.state == "joined" and ready > 0 and n.exclusive is None
        self.running += running - n.running
        n.running = running
        self.hopeful -= n.hopeful
        self.free -= n.free
        self.clean -= n.clean
        self.proven -= n.proven
        self.ahead_s -= n.counted_s
        n.ready = ready
        n.hopeful = ready + hopeful if takes else 0
        n.clean, n.proven = (clean, proven) if is_open else (0, 0)
        n.free = max(0, bare - n.anyone) if is_open else 0
        n.counted_s = n.ahead_s
        self.hopeful += n.hopeful
        self.free += n.free
        self.clean += n.clean
        self.proven += n.proven
        self.ahead_s = max(0.0, self.ahead_s + n.counted_s)
        if n.hopeful:
            self.usable.setdefault(n.name)
        else:
            self.usable.pop(n.name, None)
        if is_open:
            self.by_load.set(n.name, self._load(n))
        else:
            self.by_load.discard(n.name)
        if n.state == "joined" and spare and n.unclaimed:
            self.by_spare.set(n.name, (-n.ahead_s / max(1, ready), -spare / max(1, ready), n.index))
        else:
            self.by_spare.discard(n.name)

    def _load(self, n: Node) -> tuple[float, ...]:
        """Sort key of load: nodes with an idle slot first, then those with too few groups, then by seconds per slot."""
        ahead = len(n.unclaimed)
        if n.free:
            return (0, len(n.outstanding) / n.ready, n.ahead_s / n.ready, n.index)
        tier = 1 if ahead < self._groups_ahead * n.ready else 2
        return (tier, n.ahead_s / n.ready, ahead / n.ready, n.index)
