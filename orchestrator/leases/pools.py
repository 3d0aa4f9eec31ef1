"""Pools of a run: makes sources of leases (leases/lease.py) from the inventory, and nodes from granted leases.

`pools_of` and `make_ready` are for a run (drive.py gives them to LeasedNodes). `check_pools` and `probe_pools` are for
reports before it: the first only asks the schedulers, the second requests one lease of each pool and checks its
machine.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial

from orchestrator.engines import OK, UNUSABLE, Finding
from orchestrator.errors import EngineError, InventoryError, NodeError
from orchestrator.inventory.load import resolved
from orchestrator.inventory.model import Inventory, LoginHost, Node
from orchestrator.leases.lease import Lease, LeaseSource, LeaseState
from orchestrator.leases.lease_lifecycle import Pool, ReadyNode
from orchestrator.machines.check_script import ARGV, TIMEOUT_S, render_script
from orchestrator.machines.facts import NodeFacts
from orchestrator.machines.node_check import NodeReport, check_node
from orchestrator.machines.node_link import ssh_transport
from orchestrator.machines.node_plan import GRANTED, NodePlan, plan_lease
from orchestrator.transport.base import Transport
from worker.text import plural

AUTO_GPUS = 8
"""Before there is a lease of a whole machine, we assume that it has this many GPUs."""
_SHOW_GRANTED = "; ".join(f'echo "{name}=${{{name}-}}"' for name in GRANTED)


def slots_of(node: Node) -> int:
    """Slots that we expect a lease of the pool to have."""
    return max(1, node.gpus) if isinstance(node.gpus, int) else AUTO_GPUS


def pool_note(node: Node, asked: NodeReport) -> str:
    """Sentence on the pool's largest size, which the estimate assumes, and on what its scheduler would do."""
    pool = node.pool_words(f" of {plural(slots_of(node), 'slot')}")
    parts = [f"{node.name}: {pool}", f"the estimate counts on {node.count[1]}", *would_do(asked)]
    return "; ".join(parts)


def would_do(asked: NodeReport) -> list[str]:
    """Return what the scheduler of a pool would do with its request, in the scheduler's words."""
    return [f.what for f in asked.findings if f.level == OK and f.about in ("request", "kubernetes")]


HOLDER_OUTPUT = "~/.gemmfleet/leases"
"""Folder for the output of holders, on the machine where Slurm's commands run."""


def pools_of(inventory: Inventory, run: str, out: str = HOLDER_OUTPUT) -> list[Pool]:
    """The pools of an inventory, in its order. `out`: as for `source_of`. Raises InventoryError, InputError."""
    pools = []
    for node in inventory.nodes.values():
        if node.lease is not None:
            source = source_of(resolved(node), run, out)
            pools.append(Pool(node.name, *node.count, slots_of(node), source, node.time_s))
    return pools


def check_pools(inventory: Inventory, run: str) -> list[NodeReport]:
    """Reports on the pools, with all that schedulers tell without a lease. Raises InventoryError, InputError."""
    reports = []
    for pool in pools_of(inventory, run, ""):
        with contextlib.closing(pool.source) as source:
            reports.append(NodeReport(pool.name, tuple(source.check())))
    return reports


def probe_pools(inventory: Inventory, run: str, progress: Callable[[str], None]) -> list[NodeReport]:
    """Reports on one lease of each pool. The lease is requested, checked like a machine, and given back.

    `run`: a name that no run has. While a lease waits, `progress` is called with the scheduler's message. Raises
    InputError.
    """
    reports = []
    for pool in pools_of(inventory, run, ""):
        name = pool.name
        with contextlib.closing(pool.source) as source:
            try:
                source.ask(1)
                lease = _wait_until_ready(source, lambda words, name=name: progress(f"{name}: {words}"))  # type: ignore[misc]
                report, transport = _check_lease(inventory.nodes[name], source, lease, run)
                transport.close()
                reports.append(report)
            except NodeError as e:
                reports.append(NodeReport(name, (Finding(UNUSABLE, "lease", e.reason),)))
            finally:
                with contextlib.suppress(NodeError):
                    source.release(source.list())
    return reports


def _wait_until_ready(source: LeaseSource, progress: Callable[[str], None]) -> Lease:
    """Wait until the only lease of a source is ready. Raises NodeError if it ended."""
    shown = ""
    while True:
        for lease in source.list():
            if lease.state is LeaseState.READY:
                return lease
            if lease.state is LeaseState.ENDED:
                raise EngineError(lease.id, f"the lease ended before it was ready: {lease.why}")
            if lease.why != shown:
                shown = lease.why
                progress(f"lease {lease.id} is queued: {shown}")
        time.sleep(0.5)


def _check_lease(node: Node, source: LeaseSource, lease: Lease, run: str) -> tuple[NodeReport, Transport]:
    """Run the check script in a lease. Return the report on its machine, and a connected transport. Raises
    NodeError."""
    transport = source.transport(lease, node.name)
    try:
        transport.connect()
        began = time.time()
        done = transport.run(ARGV, stdin=render_script(resolved(node)), timeout=TIMEOUT_S)
    except BaseException:
        transport.close()
        raise
    # the grant says how many GPUs it has, so the check need not
    return check_node(node.model_copy(update={"gpus": "auto"}), done, began, run), transport


def plan_unseen(node: Node, run: str) -> NodePlan:
    """The plan of a pool's first lease, as far as it is known before: its GPUs are numbered from 0."""
    granted = {GRANTED[0]: ",".join(map(str, range(AUTO_GPUS)))}
    return plan_lease(node.model_copy(update={"name": f"{node.name}-1"}), run, NodeFacts({}), granted)[0]


def make_ready(inventory: Inventory, run: str, pool: Pool, lease: Lease, name: str) -> ReadyNode:
    """Check a lease's machine and plan its node. Raises OrchestratorError if the machine cannot be used."""
    node = inventory.nodes[pool.name].model_copy(update={"name": name})
    report, transport = _check_lease(node, pool.source, lease, run)
    try:
        if not report.usable:
            raise EngineError(name, report.problem_text())
        shown = transport.run(["sh", "-c", _SHOW_GRANTED], timeout=TIMEOUT_S).out.decode("utf-8", "replace")
        granted = {}
        for line in shown.splitlines():
            variable, _, value = line.partition("=")
            granted[variable] = value
        plan, gpus = plan_lease(node, run, report.facts, granted)
    except BaseException:
        transport.close()
        raise
    return ReadyNode(plan, transport, lease.host, gpus)


def source_of(node: Node, run: str, out: str) -> LeaseSource:
    """The source of leases for a pool with resolved references. `out`: as for SlurmSource. Raises InputError if its
    client is missing here."""
    if node.lease == "kubernetes":
        from orchestrator.leases.kubernetes import KubernetesSource, template_faults

        faults = template_faults(node.pod, node.resource)
        if faults:
            raise InventoryError([f"{node.source}: node {node.name}: pod.{fault}" for fault in faults])
        return KubernetesSource(run, node)
    from orchestrator.leases.slurm import SlurmSource

    login = partial(ssh_transport, node.login or LoginHost(), node.via) if node.via else None
    return SlurmSource(run, node, out, login)
