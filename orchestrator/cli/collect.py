"""`gemmfleet collect`: fetch and merge results of runs that were started by hand."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.options import DEFAULT_RUNS, AcceptNewHostKeysOpt, JsonOpt, LimitOpt, RunsOpt
from worker.text import plural

if TYPE_CHECKING:
    from orchestrator.collect.merging import Content
    from orchestrator.collect.node_folder import Fetched
    from orchestrator.inventory import Node
    from worker.families import Family


def collect(
    inventory: Annotated[Path, typer.Option("-i", "--inventory", metavar="INV", help="Nodes to fetch from.")],
    folder: Annotated[str, typer.Option("--from", metavar="DIR", help="Folder of the results on the nodes.")],
    family: Annotated[
        str | None,
        typer.Option("--family", metavar="F", help="Read only this family; default where a file names none."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="DIR", help="A new folder (default: one in the runs).")
    ] = None,
    limit: LimitOpt = None,
    err_ratio: Annotated[
        float, typer.Option("--err-ratio", metavar="X", help="Largest share of wrong elements of a winner.")
    ] = 0.05,
    accept_new_host_keys: AcceptNewHostKeysOpt = False,
    runs: RunsOpt = DEFAULT_RUNS,
    json_: JsonOpt = False,
) -> None:
    """Fetch, check and merge results from a folder of nodes.

    Takes tuned tables, profiles, benchmarks and logs.
    """
    from orchestrator.collect import folder as home
    from orchestrator.collect.merging import fastest_bench_rows, merge, read
    from orchestrator.errors import InputError, NoUsableNodeError
    from orchestrator.families import get_family
    from orchestrator.inventory import limit as only
    from orchestrator.inventory import load_inventory

    wanted = get_family(family) if family else None
    known = load_inventory(inventory)
    nodes = list((only(known, limit) if limit else known).nodes.values())
    notes: list[str] = []
    files, lost = _fetch_all(nodes, folder, notes, accept_new_host_keys)
    if len(lost) == len(nodes):
        raise NoUsableNodeError("\n".join(lost))
    contents = [read(f) for f in files]
    of, used = _of_family(contents, wanted, notes)
    bench = fastest_bench_rows(contents)
    if not used and not bench:
        none = f"no tuned table, profile or benchmark in {folder} of {plural(len(nodes), 'node')}"
        raise InputError([none, *notes, *lost])
    chips = {n.name: (n.gfx, n.cu_num) for n in nodes if n.gfx and n.cu_num}
    merged = merge(used, of or get_family("a4w4_blockscale"), err_ratio, chips)
    merged.notes += [*notes, *lost, *(f"{c.of.node}:{c.of.name}: {n}" for c in contents for n in c.notes)]
    paths = home.new_folder(runs, out)
    home.keep(paths, contents)
    request = {"inventory": str(inventory), "from": folder, "err_ratio": err_ratio, "family": family}
    home.write(paths, of, merged, bench, contents, request)
    counts = {"tuned": len(merged.winners), "from_profile": merged.rebuilt, "failed": len(merged.failed)}
    if json_:
        print(
            json.dumps({"folder": str(paths.root), "family": of.name if of else None, **counts, "notes": merged.notes})
        )
    else:
        _print_summary(paths.root, of, merged.notes, counts, contents, len(merged.candidates), len(bench))
    if lost:
        raise typer.Exit(1)


def _fetch_all(nodes: list[Node], folder: str, notes: list[str], accept: bool) -> tuple[list[Fetched], list[str]]:
    """Return (the files of all nodes in order, the faults of nodes that failed)."""
    from orchestrator.collect.node_folder import fetch
    from orchestrator.errors import OrchestratorError
    from orchestrator.nodes.link import transport_to
    from orchestrator.transport import connected

    def fetch_from(node: Node) -> list[Fetched] | str:
        try:
            with connected(transport_to(node, accept_new_host_keys=accept)) as transport:
                return fetch(transport, str(Path(folder).expanduser()) if node.is_here else folder, notes.append)
        except OrchestratorError as e:
            return str(e)

    with ThreadPoolExecutor(max_workers=max(1, min(32, len(nodes)))) as pool:
        answers = list(pool.map(fetch_from, nodes))
    lost = [a for a in answers if isinstance(a, str)]
    return [f for a in answers if not isinstance(a, str) for f in a], lost


def _of_family(contents: list[Content], wanted: Family | None, notes: list[str]) -> tuple[Family | None, list[Content]]:
    """Return (the one family collected, its tuned tables and profiles). Raise InputError where there are several."""
    from orchestrator.collect.merging import family_of
    from orchestrator.errors import InputError

    found: dict[Family, list[Content]] = {}
    for content in contents:
        if content.kind not in ("tuned", "profile"):
            continue
        of = family_of(content) or wanted
        if of is None:
            notes.append(f"{content.of.node}:{content.of.name}: its family is unknown; give --family")
        else:
            found.setdefault(of, []).append(content)
    if wanted is not None:
        others = [f"{c.of.node}:{c.of.name}" for f, some in found.items() if f is not wanted for c in some]
        notes += [f"left out, of other families: {', '.join(others[:10])}"] if others else []
        return wanted, found.get(wanted, [])
    if len(found) > 1:
        raise InputError(f"results of {', '.join(f.name for f in found)}: collect one at a time with --family")
    return next(iter(found.items()), (None, []))


def _print_summary(
    root: Path,
    of: Family | None,
    notes: list[str],
    counts: dict[str, int],
    contents: list[Content],
    candidates: int,
    bench: int,
) -> None:
    from orchestrator.tables.faults import escaped

    by_node: dict[str, int] = {}
    for c in contents:
        by_node[c.of.node] = by_node.get(c.of.node, 0) + 1
    print("fetched: " + ", ".join(f"{plural(n, 'file')} of {node}" for node, n in by_node.items()))
    if of is not None:
        rebuilt = f" ({counts['from_profile']} of them from profiles alone)" if counts["from_profile"] else ""
        tuned, measured = plural(counts["tuned"], "shape"), plural(candidates, "candidate")
        print(f"{of.name}: {tuned} tuned{rebuilt}, {counts['failed']} failed, {measured}")
    if bench:
        print(f"benchmarks: {plural(bench, 'measurement')}")
    for note in notes:
        print(f"note: {escaped(note)}", file=sys.stderr)
    print(f"written: {root}")
