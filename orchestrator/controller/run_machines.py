"""Asks the nodes and the schedulers of an inventory what they have, and says which of them a run can use.

prepare.py calls `ask_machines` before it plans. A node is unusable if a finding on it says so: one of its check
(machines/node_check.py), that it has no AITER although the tuner needs one, or that others occupy it and the user wants
to skip it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.controller.request import RunRequest
from orchestrator.controller.run_inputs import RunInputs
from orchestrator.engines import UNUSABLE, WARNING, Finding, find_engine
from orchestrator.errors import NoUsableNodeError
from orchestrator.inventory.model import Inventory, Node
from orchestrator.leases.pools import check_pools, plan_unseen, slots_of
from orchestrator.machines.facts import NodeFacts
from orchestrator.machines.gpu_names import refuse_one_gpu_twice
from orchestrator.machines.node_check import NodeReport, check_nodes
from orchestrator.machines.node_plan import NodePlan, plan_nodes
from orchestrator.machines.occupancy import (
    Occupant,
    busy_sentence,
    gpus_of,
    mode_of,
    occupants,
    occupants_text,
    what_we_do,
)
from worker.aiter_tree.locate import PLACES
from worker.tuners.catalog import TunerSpec

NO_AITER = (
    UNUSABLE,
    "aiter",
    f"there is no AITER: its Python imports none, and none is in {', '.join(PLACES)}",
    "name its folder, `aiter: {root: PATH}`, or a Python that imports it, `python: PATH`",
)

GPUS_UNKNOWN = Finding(UNUSABLE, "gpus", "its GPUs are not known before it is asked", "write their number, `gpus: 8`")
"""The finding on a node that is not asked."""


@dataclass(frozen=True, slots=True)
class RunMachines:
    """The machines and pools of a run, as far as they are known."""

    reports: list[NodeReport]
    """On machines, then on pools."""
    pool_reports: list[NodeReport]
    facts: Mapping[str, NodeFacts]
    nodes: list[NodePlan]
    usable: list[NodePlan]
    """The part of `nodes` that can be used."""
    pools: list[Node]
    """Pools that can be used."""
    occupied: list[str]
    """The usable machines that the run will wait for, because someone else computes there."""

    def chip(self, inventory: Inventory) -> tuple[str, int]:
        """(gfx, cu_num) of the first node, the usable ones first; ("", 0) if it is unknown."""
        candidates: list[NodePlan | Node] = [*self.usable, *self.pools, *self.nodes, *inventory.nodes.values()]
        return candidates[0].gfx or "", candidates[0].cu_num or 0

    def slots(self) -> dict[str, int]:
        """Slots of each usable machine, and of each pool at its largest size."""
        of_machines = {plan.node: len(plan.slots) for plan in self.usable}
        return {**of_machines, **{pool.name: pool.count[1] * slots_of(pool) for pool in self.pools}}


def ask_machines(request: RunRequest, inputs: RunInputs, run: str) -> RunMachines:
    """Ask the nodes and schedulers what they have, and plan the nodes. Raises NoUsableNodeError, InventoryError."""
    inventory = inputs.inventory
    machines = inventory.without_pools()
    to_ask = _nodes_to_ask(machines, inputs.spec, request.runs)
    if request.ask:
        reports = check_nodes(to_ask, runs=request.runs, accept_new_host_keys=request.accept_new_host_keys)
        pool_reports = check_pools(inventory, run)
    else:
        unknown = [node for node in to_ask if node.gpus == "auto" and not node.is_here]
        reports = [NodeReport(node.name, (GPUS_UNKNOWN,)) for node in unknown]
        pool_reports = [NodeReport(name, ()) for name, node in inventory.nodes.items() if node.lease]
    _refuse_gpus_with_two_names(machines, reports)
    reports = [_with_occupants(report, machines.nodes[report.node], request.busy) for report in reports]
    if inputs.spec.software == "aiter" and "root" not in inputs.options:
        reports = [r.with_finding(*NO_AITER) if r.facts.values.get("aiter") == "none" else r for r in reports]
    facts = {report.node: report.facts for report in reports}
    nodes = plan_nodes(machines, run, (request.runs / run).absolute(), facts)
    unusable = {report.node for report in reports if not report.usable}
    usable = [node for node in nodes if node.slots and node.node not in unusable]
    pools = [inventory.nodes[report.node] for report in pool_reports if report.usable]
    if not usable and not pools and not request.plan:
        problems = [f"  {problem}" for report in (*reports, *pool_reports) for problem in report.problems()]
        raise NoUsableNodeError("\n".join(["no node can be used:", *problems]))
    if not request.ask:
        nodes = [*usable, *(plan_unseen(pool, run) for pool in pools)]
    occupied = [r.node for r in reports if _is_waited_for(r, machines.nodes[r.node], request.busy)]
    return RunMachines([*reports, *pool_reports], pool_reports, facts, nodes, usable, pools, occupied)


def _nodes_to_ask(machines: Inventory, spec: TunerSpec, runs: Path) -> list[Node]:
    """All machines, but not this one if there is nothing to ask. Here the runs lie in `runs` if no workdir is given."""
    nodes = []
    for node in machines.nodes.values():
        if not node.is_here:
            nodes.append(node)
        elif find_engine(node.engine).runs_images or spec.software:
            nodes.append(node.model_copy(update={"workdir": node.workdir or str(runs.absolute())}))
    return nodes


def _refuse_gpus_with_two_names(inventory: Inventory, reports: Sequence[NodeReport]) -> None:
    """Raise InventoryError if two slots are the same GPU. This machine is checked too, if it is not the only node."""
    facts = {report.node: report.facts for report in reports}
    if len(inventory.nodes) > 1:
        here = [n for n in inventory.nodes.values() if n.is_here and n.gpus != 0 and n.name not in facts]
        facts |= {report.node: report.facts for report in check_nodes(here)}
    refuse_one_gpu_twice(inventory.nodes, facts)


def _occupants_of(report: NodeReport, node: Node) -> Sequence[Occupant]:
    """Return the others that compute on a node that can be used."""
    return occupants(report.facts, gpus_of(node, report.facts), "") if report.usable else ()


def _is_waited_for(report: NodeReport, node: Node, requested: str | None) -> bool:
    """Return whether the run waits until the node is free. `requested`: the user's choice for all nodes, if any."""
    return mode_of(node, requested) == "wait" and bool(_occupants_of(report, node))


def _with_occupants(report: NodeReport, node: Node, requested: str | None) -> NodeReport:
    """The report, with a finding on what we do about the node's occupants. With `skip` the node counts as unusable."""
    present = _occupants_of(report, node)
    if not present:
        return report
    mode = what_we_do(mode_of(node, requested), present)
    text = busy_sentence("it", mode, occupants_text(present))
    finding = Finding(UNUSABLE if mode == "skip" else WARNING, "busy", text)
    others = [f for f in report.findings if f.about != "busy"]
    return replace(report, findings=(*others, finding))
