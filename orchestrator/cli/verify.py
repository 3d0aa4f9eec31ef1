"""`gemmfleet verify`: check on nodes that AITER uses tuned rows, and that their results are correct."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator.cli.options import AcceptNewHostKeysOpt, LimitOpt, RunArg, RunsOpt
from orchestrator.errors import InputError, NoUsableNodeError
from orchestrator.inventory import load as inventories
from orchestrator.inventory.model import Inventory, Node
from orchestrator.machines.node_command import deployed_on
from orchestrator.pages import Page
from orchestrator.paths import DEFAULT_RUNS, RunConfig, RunPaths, find_run
from orchestrator.results.verify import Verified, verify_on
from orchestrator.shapes.model import describe
from orchestrator.tables import export
from worker.families import Family
from worker.text import plural

MOST_UNPROVEN = 10
"""Rows of a node that are listed because they are not proven."""
MOST_NODES_AT_ONCE = 16


def verify(
    run: RunArg = None,
    inventory: Annotated[
        Path | None, typer.Option("-i", "--inventory", metavar="INV", help="Nodes to verify on; default: the run's.")
    ] = None,
    table: Annotated[
        Path | None, typer.Option(metavar="CSV", help="This tuned table instead of a run's tuned.csv.")
    ] = None,
    family: Annotated[str | None, typer.Option(metavar="F", help="Family of the table, where it is ambiguous.")] = None,
    limit: LimitOpt = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show what AITER prints.")] = False,
    accept_new_host_keys: AcceptNewHostKeysOpt = False,
    runs: RunsOpt = DEFAULT_RUNS,
) -> Page:
    """Check on nodes that AITER uses the tuned rows correctly.

    Runs AITER's operators with the tuned rows; exit code 1 where a row is not used, or its result is wrong.
    """
    if table is not None and inventory is None and run is None:
        raise InputError(f"--table {table}: name the nodes with -i INV, or a run that has them")
    if table is not None and inventory is not None:
        table_family, rows = _read_rows(table, family)
    else:
        paths = find_run(runs, run, tuned=table is None)
        table_family, rows = _read_rows(table or paths.tuned, family)
        if inventory is None:
            inventory, limit = _inventory_of_run(paths, limit)
    known = inventories.load_inventory(inventory)
    if limit:
        known = inventories.limit(known, limit)
    nodes = list(known.nodes.values())
    inventories.check_references(nodes)

    def verify_node(node: Node) -> Verified:
        return _verify_on_node(
            known, node, table_family, rows, verbose=verbose, accept_new_host_keys=accept_new_host_keys
        )

    with ThreadPoolExecutor(max_workers=max(1, min(MOST_NODES_AT_ONCE, len(nodes)))) as pool:
        answers = list(pool.map(verify_node, nodes))
    page = Page({"family": table_family.name, "nodes": [answer.to_json() for answer in answers]})
    page.code = int(not _all_proven(answers, len(rows)))
    if all(answer.why for answer in answers):
        page.error = _no_node_could_verify(answers)
        return page
    for answer in answers:
        _add_node(page, answer)
    return page


def _no_node_could_verify(answers: Sequence[Verified]) -> NoUsableNodeError:
    """Return the error that tells each reason once, with the nodes that have it."""
    nodes_by_reason: dict[str, list[str]] = {}
    for answer in answers:
        nodes_by_reason.setdefault(answer.why, []).append(answer.node)
    reasons = "; ".join(f"{', '.join(nodes)}: {why}" for why, nodes in nodes_by_reason.items())
    return NoUsableNodeError(f"no node could verify: {reasons}")


def _read_rows(path: Path, family: str | None) -> tuple[Family, list[Any]]:
    """Return the family and the rows of a tuned table. Raises InputError."""
    [(table_family, [source])] = export.read_sources([path], family).items()
    rows = [source.cells(row) for row in source.rows]
    if not rows:
        raise InputError(f"{path}: has no row to verify")
    return table_family, rows


def _inventory_of_run(paths: RunPaths, limit: str | None) -> tuple[Path, str | None]:
    """Return the inventory of a run, and `limit`, else the run's own. Raises InputError."""
    if not paths.inventory.is_file():
        raise InputError(f"{paths.root}: has no inventory (collected from elsewhere?); name nodes with -i INV")
    return paths.inventory, limit or RunConfig.read(paths.config).limit


def _verify_on_node(
    inventory: Inventory, node: Node, family: Family, rows: Sequence[Any], *, verbose: bool, accept_new_host_keys: bool
) -> Verified:
    def log(line: str) -> None:
        if verbose:
            print(f"[{node.name}] {line}", file=sys.stderr, flush=True)

    deployed = partial(deployed_on, inventory, node, "verify", accept_new_host_keys=accept_new_host_keys)
    return verify_on(lambda files: deployed(files=files), node.name, family, rows, log)


def _all_proven(answers: Sequence[Verified], rows: int) -> bool:
    """Return whether every node verified, no row is wrong on any, and each row is proven on at least one."""
    for answer in answers:
        if answer.why or any(row.verdict in ("mismatch", "error") for row in answer.rows):
            return False
    return all(any(answer.rows[i].proven for answer in answers) for i in range(rows))


def _add_node(page: Page, answer: Verified) -> None:
    """Add what a node answered: the AITER that it has, and the rows that are not proven there."""
    if answer.why:
        page.line(f"{answer.node}: not verified: {answer.why}")
        return
    build = answer.aiter
    proven = sum(row.proven for row in answer.rows)
    version = build.get("version") or str(build.get("commit", ""))[:10] or "of unknown version"
    about = f"AITER {version} in {build.get('root')}, {build.get('gfx')} with {build.get('cu_num')}"
    if build.get("how"):
        about += f"; ran {build['how']}"
    page.line(f"{answer.node}: {proven} of {plural(len(answer.rows), 'row')} proven ({about})")
    unproven = []
    for row in answer.rows:
        if not row.proven:
            shape = describe(int(value) for value in row.key.values() if value.isdigit())
            why = f" ({row.why})" if row.why else ""
            unproven.append(f"  {shape}: {'' if row.selected else 'not '}used by the lookup, {row.verdict}{why}")
    page.lines(unproven, most=MOST_UNPROVEN)
    if not proven or answer.code:
        page.line(*(f"  | {line}" for line in answer.last[-5:]))
