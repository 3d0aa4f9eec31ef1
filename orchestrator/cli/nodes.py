"""`gemmfleet nodes`: check nodes, add or drain them in a running run, list the candidates they skip."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.options import DEFAULT_RUNS, AcceptNewHostKeysOpt, JsonOpt, LimitOpt, RunsOpt


def check(
    inventory: Annotated[
        Path | None, typer.Option("-i", "--inventory", help="Nodes to check; default: this machine.", metavar="INV")
    ] = None,
    limit: LimitOpt = None,
    accept_new_host_keys: AcceptNewHostKeysOpt = False,
    lease: Annotated[
        bool, typer.Option("--lease", help="Take one lease of each pool for a moment, and check its machine, too.")
    ] = False,
    json_: JsonOpt = False,
) -> None:
    """Check what every node has and what it lacks.

    Exit code 3 if one cannot be used.
    """
    import json

    from orchestrator.cli.output.terminal import console, plain, table
    from orchestrator.inventory import limit as only
    from orchestrator.inventory import load_inventory
    from orchestrator.nodes.check import COLUMNS, check_nodes
    from orchestrator.paths import new_run_id
    from orchestrator.run.leased import check_pools, probe_pools
    from orchestrator.templating import data_folder

    known = load_inventory(inventory or data_folder("inventories") / "local.yaml")
    if limit is not None:
        known = only(known, limit)
    machines = [n for n in known.nodes.values() if n.lease is None]
    reports = check_nodes(machines, accept_new_host_keys=accept_new_host_keys) if machines else []
    pools = check_pools(known, "check")
    if lease and all(r.usable for r in pools):
        run = f"check-{new_run_id(time.time())}"
        pools += probe_pools(known, run, lambda words: print(words, file=sys.stderr, flush=True))
    reports += pools
    if json_:
        print(json.dumps({"nodes": [r.to_json() for r in reports]}, indent=1))
    else:
        t = table(*COLUMNS[:-1])
        for r in reports:
            t.add_row(*(plain(cell, 60) for cell in r.row()[:-1]))
        console().print(t)
        for words in dict.fromkeys(r.devices() for r in reports if r.usable and r.devices()):
            print(plain(f"{', '.join(r.node for r in reports if r.devices() == words)}: {words}"))
        for r in reports:
            for text in r.problems():
                print(("! " if not r.usable else "") + plain(text))
    if not all(r.usable for r in reports):
        raise typer.Exit(3)


def drain(
    node: Annotated[str, typer.Argument(metavar="NODE", help="Name of the node.")],
    run: Annotated[str | None, typer.Option(help="The run; default: the latest.", metavar="RUN")] = None,
    runs: RunsOpt = DEFAULT_RUNS,
) -> None:
    """Give a node no more groups; those it runs may end."""
    _request(runs, run, "drain", node)
    print(f"{node} ends its running groups and gets no more")


def add(
    inventory: Annotated[
        Path, typer.Option("-i", "--inventory", help="The inventory with the new nodes.", metavar="INV")
    ],
    run: Annotated[str | None, typer.Option(help="The run; default: the latest.", metavar="RUN")] = None,
    runs: RunsOpt = DEFAULT_RUNS,
) -> None:
    """Add the new nodes of an inventory to a running run."""
    from orchestrator.cli.tuning import replace_inventory
    from orchestrator.inventory import load_inventory
    from orchestrator.paths import find_run

    paths = find_run(runs, run)
    old = set(load_inventory(paths.inventory).nodes)
    new = [n for n in load_inventory(inventory).nodes if n not in old]
    replace_inventory(paths, inventory)
    _request(runs, run, "join", "")
    print(f"joining run {paths.run}: {', '.join(new) or 'no new node'}")


def _request(runs: Path, run: str | None, kind: str, node: str) -> None:
    from orchestrator.command_hints import command
    from orchestrator.dispatch import control
    from orchestrator.dispatch.control import holder
    from orchestrator.errors import InputError
    from orchestrator.inventory import load_inventory
    from orchestrator.paths import find_run

    paths = find_run(runs, run)
    if node and node not in (there := load_inventory(paths.inventory).nodes):
        raise InputError(f"run {paths.run} has no node {node!r} (there: {', '.join(there)})")
    if not holder(paths.lock):
        raise InputError(
            f"no controller drives run {paths.run}; change its nodes with: {command(f'resume {paths.named} -i INV')}"
        )
    control.ask(paths.requests, kind, node=node)
