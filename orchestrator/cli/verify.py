"""`gemmfleet verify`: check on nodes that AITER uses the tuned rows and computes correctly."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.options import DEFAULT_RUNS, AcceptNewHostKeysOpt, JsonOpt, LimitOpt, RunArg, RunsOpt
from worker.text import plural

if TYPE_CHECKING:
    from orchestrator.inventory import Node
    from orchestrator.results.verify import Verified

SHOWN = 10


def verify(
    run: RunArg = None,
    inventory: Annotated[
        Path | None, typer.Option("-i", "--inventory", metavar="INV", help="Nodes to verify on; default: the run's.")
    ] = None,
    table: Annotated[
        Path | None, typer.Option("--table", metavar="CSV", help="This tuned table instead of a run's tuned.csv.")
    ] = None,
    family: Annotated[
        str | None, typer.Option("--family", metavar="F", help="Family of the table, where it is ambiguous.")
    ] = None,
    limit: LimitOpt = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show what AITER prints.")] = False,
    accept_new_host_keys: AcceptNewHostKeysOpt = False,
    runs: RunsOpt = DEFAULT_RUNS,
    json_: JsonOpt = False,
) -> None:
    """Check on nodes that AITER uses the tuned rows correctly.

    Runs AITER's operators with the tuned rows; exit code 1 where a row is not used, or its result is wrong.
    """
    from orchestrator.errors import InputError, NoUsableNodeError
    from orchestrator.inventory import limit as only
    from orchestrator.inventory import load_inventory
    from orchestrator.nodes.command import deployed_on
    from orchestrator.paths import RunConfig, find_run
    from orchestrator.results.verify import verify_on
    from orchestrator.tables.export import refuse_own
    from orchestrator.tables.locate import family_of
    from orchestrator.tables.tuned import read_table

    if table is not None and inventory is None and run is None:
        raise InputError(f"--table {table}: name the nodes with -i INV, or a run that has them")
    paths = find_run(runs, run) if table is None or inventory is None else None
    path = table or (paths.tuned if paths else Path())
    of = family_of(path, family)
    source = read_table(path, of, doubled=True)
    refuse_own([source])
    rows = [source.cells(r) for r in source.rows]
    if not rows:
        raise InputError(f"{path}: has no row to verify")
    if inventory is None and paths is not None:
        if not paths.inventory.is_file():
            raise InputError(f"{paths.root}: has no inventory (collected from elsewhere?); name nodes with -i INV")
        inventory, limit = paths.inventory, limit or RunConfig.read(paths.config).limit
    known = load_inventory(inventory or Path())
    known = only(known, limit) if limit else known
    nodes = list(known.nodes.values())

    def one(node: Node) -> Verified:
        def log(line: str) -> None:
            if verbose:
                print(f"[{node.name}] {line}", file=sys.stderr, flush=True)

        deployed = partial(deployed_on, known, node, "verify", accept_new_host_keys=accept_new_host_keys)
        return verify_on(lambda files: deployed(files=files), node.name, of, rows, log)

    with ThreadPoolExecutor(max_workers=max(1, min(16, len(nodes)))) as pool:
        answers = list(pool.map(one, nodes))
    good = [a for a in answers if not a.why]
    if json_:
        print(json.dumps({"family": of.name, "nodes": [_document(a) for a in answers]}))
    else:
        for answer in answers:
            _print_node(answer)
    if not good:
        raise NoUsableNodeError("no node could verify: " + "; ".join(f"{a.node}: {a.why}" for a in answers))
    wrong = any(r.verdict in ("mismatch", "error") for a in good for r in a.rows)
    unproven = any(not any(a.rows[i].proven for a in good) for i in range(len(rows)))
    if wrong or unproven or len(good) < len(answers):
        raise typer.Exit(1)


def _document(a: Verified) -> dict[str, Any]:
    rows = [
        {**r.key, "kernel": r.kernel, "selected": r.selected, "verdict": r.verdict, "us": r.us, "tuned_us": r.tuned_us,
         "why": r.why}
        for r in a.rows
    ]  # fmt: skip
    return {"node": a.node, "why": a.why, "aiter": a.aiter, "code": a.code, "rows": rows}


def _print_node(a: Verified) -> None:
    if a.why:
        print(f"{a.node}: not verified: {a.why}")
        return
    proven = sum(r.proven for r in a.rows)
    build = a.aiter
    what = f"AITER {build.get('version') or str(build.get('commit', ''))[:10]} in {build.get('root')}"
    rows, chip = plural(len(a.rows), "row"), f"{build.get('gfx')} with {build.get('cu_num')}"
    print(f"{a.node}: {proven} of {rows} proven ({what}, {chip})")
    bad = [r for r in a.rows if not r.proven]
    for r in bad[:SHOWN]:
        key = " ".join(f"{k}={v}" for k, v in r.key.items())
        used = "used" if r.selected else "not used by the lookup"
        print(f"  {key}: {used}, {r.verdict}" + (f" ({r.why})" if r.why else ""))
    if len(bad) > SHOWN:
        print(f"  ... and {len(bad) - SHOWN} more")
    if not proven or a.code:
        for line in a.last[-5:]:
            print(f"  | {line}")
