"""Puts what a plan says will go wrong on the simulator's clock."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from orchestrator import events as ev

if TYPE_CHECKING:
    from orchestrator.simulation.simulator import Simulator


def schedule(sim: Simulator) -> None:
    """Everything that has a time. What hangs on a shape or slot is decided by the node when it gets there."""
    faults = sim.plan.faults
    for o in faults.outages:
        node = sim.nodes[o.node]
        if o.kind == "power":
            sim.later(o.at, partial(node.power_cut, o.seconds, "outage"))
        else:
            sim.later(o.at, partial(node.cut_off, o.seconds))
    for (name, slot), t in faults.dead_slots.items():
        sim.later(t, partial(sim.slot_dies, sim.nodes[name], slot))
    for name, t in faults.drains.items():
        sim.later(t, partial(sim.asked, ev.NodeDraining(name)))
    for t, event in faults.asked:
        sim.later(t, partial(sim.asked, event))
    for span in faults.controller:
        sim.later(span.since, sim.controller_dies)
        sim.later(span.until, sim.controller_starts)
