"""`gemmfleet nodes`: check nodes, and change those of a running run."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.driving import replace_inventory
from orchestrator.cli.options import AcceptNewHostKeysOpt, LimitOpt, RunsOpt
from orchestrator.cli.printer import plain
from orchestrator.command_hints import command
from orchestrator.errors import InputError
from orchestrator.inventory.load import inventory_path, load_inventory
from orchestrator.inventory.load import limit as limit_inventory
from orchestrator.inventory.model import Inventory
from orchestrator.leases.pools import check_pools, probe_pools, would_do
from orchestrator.ledger.reader import LedgerReader
from orchestrator.machines import node_check
from orchestrator.pages import Page
from orchestrator.paths import DEFAULT_RUNS, RunConfig, RunPaths, find_run, holder, leave_request, new_run_id

WIDEST_CELL = 60

RunOpt = Annotated[str | None, typer.Option("--run", help="The run; default: the latest.", metavar="RUN")]


def check_nodes(
    inventory: Annotated[
        Path | None, typer.Option("-i", "--inventory", help="Nodes to check; default: this machine.", metavar="INV")
    ] = None,
    limit: LimitOpt = None,
    accept_new_host_keys: AcceptNewHostKeysOpt = False,
    lease: Annotated[
        bool, typer.Option("--lease", help="Take one lease of each pool for a moment, and check its machine, too.")
    ] = False,
) -> Page:
    """Check what every node has and what it lacks.

    Exit code 1 if a node cannot be used, 3 if none can.
    """
    known = limit_inventory(load_inventory(inventory_path(inventory)), limit)
    machines = [*known.without_pools().nodes.values()]
    reports = node_check.check_nodes(machines, accept_new_host_keys=accept_new_host_keys) if machines else []
    pools = check_pools(known, "check")
    if lease and all(report.usable for report in pools):
        pools += probe_pools(known, f"check-{new_run_id(time.time())}", _say)
    reports += pools
    usable = [report for report in reports if report.usable]
    fixes = _fixes_of_aiter(known, usable) if known.defaults.tuner == "aiter" else {}
    documents = [{**report.to_json(), "aiter": fixes.get(report.node, "")} for report in reports]
    page = Page({"nodes": documents}, _exit_code(len(usable), len(reports)))
    # the last column, what is wrong with the node, follows in sentences
    rows = [[plain(cell, WIDEST_CELL) for cell in report.row()[:-1]] for report in reports]
    page.table(node_check.COLUMNS[:-1], rows, most=len(reports))
    for devices in dict.fromkeys(report.devices() for report in usable if report.devices()):
        names = [report.node for report in reports if report.devices() == devices]
        page.line(f"{', '.join(names)}: {devices}")
    for report in pools:
        page.line(*(f"{report.node}: {words}" for words in would_do(report)))
    page.line(*(f"{node}: {words}" for node, words in fixes.items()))
    for report in reports:
        mark = "" if report.usable else "! "
        page.line(*(f"{mark}{text}" for text in report.problems()))
    return page


def _fixes_of_aiter(inventory: Inventory, usable: Sequence[node_check.NodeReport]) -> dict[str, str]:
    """Return, for each node, a sentence on the fixes that its AITER needs."""
    from orchestrator.image.fixes import aiter_lines  # imports docker

    return aiter_lines(inventory.nodes.values(), {report.node: report.facts for report in usable})


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def _exit_code(usable: int, nodes: int) -> int:
    if usable == nodes and nodes:
        return 0
    return 1 if usable else 3


def drain_node(
    node: Annotated[str, typer.Argument(metavar="NODE", help="Name of the node.")],
    run: RunOpt = None,
    runs: RunsOpt = DEFAULT_RUNS,
) -> None:
    """Give a node no more groups; its running groups may finish."""
    paths = _find_driven_run(runs, run)
    nodes = limit_inventory(load_inventory(paths.inventory), RunConfig.read(paths.config).limit).nodes
    if node not in nodes:
        raise InputError(f"run {paths.run} has no node {node!r} (there: {', '.join(nodes)})")
    leave_request(paths.requests, "drain", node=node)
    print(f"{node} finishes its running groups and gets no more")


def add_nodes(
    inventory: Annotated[
        Path, typer.Option("-i", "--inventory", help="The inventory with the new nodes.", metavar="INV")
    ],
    run: RunOpt = None,
    runs: RunsOpt = DEFAULT_RUNS,
) -> None:
    """Add the new nodes of an inventory to a running run."""
    edited = load_inventory(inventory)
    paths = _find_driven_run(runs, run)
    label = RunConfig.read(paths.config).limit
    new = edited.nodes.keys() - load_inventory(paths.inventory).nodes.keys()
    within = limit_inventory(edited, label).nodes
    replace_inventory(paths, inventory)
    leave_request(paths.requests, "join")
    joining = [name for name in within if name in new]
    print(f"joining run {paths.run}: {', '.join(joining) or 'no new node'}")
    outside = [name for name in edited.nodes if name in new and name not in within]
    if outside:
        print(f"not in the run's --limit {label}: {', '.join(outside)}")


def _find_driven_run(runs: Path, run: str | None) -> RunPaths:
    """Return the run, which a controller must drive. Raises InputError."""
    paths = find_run(runs, run)
    if holder(paths.lock):
        return paths
    with LedgerReader.open_readonly(paths.ledger) as ledger:
        state = ledger.state
    hint = "" if state == "finished" else f"; go on with other nodes: {command(f'resume {paths.named} -i INV')}"
    raise InputError(f"no controller drives run {paths.run}, which is {state}{hint}")
