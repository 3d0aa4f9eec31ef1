"""Commands on nodes, inventories and images; `gemmfleet selftest`; changes of the nodes of a run."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from orchestrator.cli.options import AcceptNewHostKeysOpt, JsonOpt, LimitOpt, RunsOpt
from orchestrator.cli.printer import Page, plain
from orchestrator.command_hints import command
from orchestrator.errors import InputError, InventoryError
from orchestrator.paths import DEFAULT_RUNS, RunConfig, RunPaths, find_run, holder, leave_request
from worker.text import plural

if TYPE_CHECKING:
    from orchestrator.image.build import Recipe
    from orchestrator.inventory.model import Inventory, Node

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
    from orchestrator.controller.pools import check_pools, probe_pools, would_do
    from orchestrator.image.fixes import aiter_lines
    from orchestrator.inventory import load as inventories
    from orchestrator.machines import node_check as check
    from orchestrator.paths import new_run_id
    from orchestrator.templating import data_folder

    known = inventories.limit(inventories.load_inventory(inventory or data_folder("inventories") / "local.yaml"), limit)
    machines = [n for n in known.nodes.values() if n.lease is None]
    reports = check.check_nodes(machines, accept_new_host_keys=accept_new_host_keys) if machines else []
    pools = check_pools(known, "check")
    if lease and all(r.usable for r in pools):
        run = f"check-{new_run_id(time.time())}"
        pools += probe_pools(known, run, lambda words: print(words, file=sys.stderr, flush=True))
    reports += pools
    unusable = [r for r in reports if not r.usable]
    code = 1 if unusable else 0
    if unusable == reports:
        code = 3
    usable_facts = {r.node: r.facts for r in reports if r.usable}
    fixes_of = aiter_lines(known.nodes.values(), usable_facts) if known.defaults.tuner == "aiter" else {}
    documents = [{**r.to_json(), "aiter": fixes_of.get(r.node, "")} for r in reports]
    page = Page({"nodes": documents}, code)
    page.table(check.COLUMNS[:-1], ([plain(cell, 60) for cell in r.row()[:-1]] for r in reports), most=len(reports))
    for words in dict.fromkeys(r.devices() for r in reports if r.usable and r.devices()):
        page.line(f"{', '.join(r.node for r in reports if r.devices() == words)}: {words}")
    page.line(*(f"{r.node}: {words}" for r in pools for words in would_do(r)))
    page.line(*(f"{node}: {words}" for node, words in fixes_of.items()))
    page.line(*(("" if r.usable else "! ") + text for r in reports for text in r.problems()))
    return page


def drain(
    node: Annotated[str, typer.Argument(metavar="NODE", help="Name of the node.")],
    run: RunOpt = None,
    runs: RunsOpt = DEFAULT_RUNS,
) -> None:
    """Give a node no more groups; its running groups may finish."""
    from orchestrator.inventory.load import limit, load_inventory

    paths = _driven(runs, run)
    if node not in (there := limit(load_inventory(paths.inventory), RunConfig.read(paths.config).limit).nodes):
        raise InputError(f"run {paths.run} has no node {node!r} (there: {', '.join(there)})")
    leave_request(paths.requests, "drain", node=node)
    print(f"{node} finishes its running groups and gets no more")


def add(
    inventory: Annotated[
        Path, typer.Option("-i", "--inventory", help="The inventory with the new nodes.", metavar="INV")
    ],
    run: RunOpt = None,
    runs: RunsOpt = DEFAULT_RUNS,
) -> None:
    """Add the new nodes of an inventory to a running run."""
    from orchestrator.cli.tuning import replace_inventory
    from orchestrator.inventory.load import limit, load_inventory

    paths = _driven(runs, run)
    label, edited = RunConfig.read(paths.config).limit, load_inventory(inventory)
    new = edited.nodes.keys() - load_inventory(paths.inventory).nodes.keys()
    within = limit(edited, label).nodes
    replace_inventory(paths, inventory)
    leave_request(paths.requests, "join")
    print(f"joining run {paths.run}: {', '.join(n for n in within if n in new) or 'no new node'}")
    if outside := [n for n in edited.nodes if n in new and n not in within]:
        print(f"not in the run's --limit {label}: {', '.join(outside)}")


def _driven(runs: Path, run: str | None) -> RunPaths:
    """Return the run, which a controller must drive. Raises InputError."""
    from orchestrator.ledger.reader import LedgerReader

    paths = find_run(runs, run)
    if not holder(paths.lock):
        with LedgerReader.open_readonly(paths.ledger) as ledger:
            state = ledger.state
        way = "" if state == "finished" else f"; go on with other nodes: {command(f'resume {paths.named} -i INV')}"
        raise InputError(f"no controller drives run {paths.run}, which is {state}{way}")
    return paths


def selftest(
    inventory: Annotated[Path, typer.Option("-i", "--inventory", help="The inventory with the node.", metavar="INV")],
    out: Annotated[
        Path, typer.Option("-o", "--out", help="Write the bundle here; it must not exist yet.", metavar="BUNDLE.tar.gz")
    ],
    node: Annotated[str | None, typer.Option("--node", help="The node; default: the first.", metavar="NODE")] = None,
    minutes: Annotated[int, typer.Option("--minutes", min=2, help="Minutes that it may take.", metavar="N")] = 15,
    runs: RunsOpt = DEFAULT_RUNS,
) -> Page:
    """Try on one node with an MI355X what nobody has seen there yet.

    Exit code 1 if a statement did not hold, 3 if none could be tried. The bundle names no host, user or path.
    """
    from orchestrator.paths import create_run_folder, new_run_id
    from orchestrator.results import selftest as of

    if out.exists() or not out.parent.is_dir():
        what = "exists already" if out.exists() else "its folder does not exist"
        raise InputError(f"{out}: {what}: name another file with -o")
    of.node_of(inventory, node)
    folder, rows = create_run_folder(runs.absolute(), f"selftest-{new_run_id(time.time())}").root, list[Any]()
    trial = of.Trial(folder, inventory, node, 60.0 * minutes - of.ENDING_S)
    before = signal.signal(signal.SIGINT, trial.interrupt)
    try:
        for row in of.tried(trial):
            rows.append(row)
            print(plain(f"{row['number']:2} {row['outcome']}: {row['statement']}"), file=sys.stderr, flush=True)
    finally:
        signal.signal(signal.SIGINT, before)
    counts = {outcome: sum(row["outcome"] == outcome for row in rows) for outcome in of.OUTCOMES}
    code = 1 if counts[of.NOT_HELD] else 0
    if counts[of.NOT_TRIED] == len(rows):
        code = 3
    if trial.interrupted:
        code = 130
    page = Page({"statements": rows, "counts": counts, "bundle": str(out)}, code)
    cells, above = [list(map(str, row.values())) for row in rows], ""
    for line in cells:
        above, line[-1] = line[-1], "as above" if line[-1] and line[-1] == above else line[-1]
    page.table(("", *list(rows[0])[1:]), cells)
    page.line(", ".join(f"{n} {outcome}" for outcome, n in counts.items()), f"  {out}", f"  runs: {folder}")
    of.pack(trial, json.dumps(page.document, indent=1, ensure_ascii=False), out)
    return page


def check_inventory(
    file: Annotated[
        Path | None, typer.Argument(metavar="[INVENTORY.yaml]", help="Default: inventories/local.yaml.")
    ] = None,
    env: Annotated[
        bool, typer.Option("--env", help="Also check the values of all ${env:NAME}, as they are now.")
    ] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of inventories instead, for editors.")
    ] = False,
    json_: JsonOpt = False,
) -> Page | None:
    """Check an inventory as `tune` reads it; contacts no node.

    Prints the nodes and options that result, or every fault (exit code 2).
    """
    from orchestrator.inventory import load as inventories
    from orchestrator.inventory.model import dumps
    from orchestrator.machines.gpu_names import refuse_one_gpu_twice
    from orchestrator.templating import data_folder

    if schema:
        print(dumps(), end="")
        return None
    path = file or data_folder("inventories") / "local.yaml"
    try:
        found = inventories.load_inventory(path)
        refuse_one_gpu_twice(found.nodes, {})
        inventories.check_identities(found.nodes.values())
        if env:
            inventories.check_references(found.nodes.values())
    except InputError as e:
        unset = inventories.unset_variables(path) if env else {}
        faults = [*e.faults, *(fault for name, fault in unset.items() if f"{{env:{name}}}" not in str(e))]
        if json_:
            Page({"ok": False, "file": str(path), "faults": faults}).print(as_json=True)
        raise InventoryError(faults) from e
    nodes = [_about(node) for node in found.nodes.values()]
    fleet = {"family": found.defaults.family, "tuner": found.defaults.tuner}
    document = {"ok": True, "file": found.source, **fleet, "nodes": nodes}
    page = Page(document)
    page.line(f"{found.source}: good, {plural(len(found.nodes), 'node')}")
    for node in nodes:
        page.line(*_node_lines(node))
    return page


def _about(node: Node) -> dict[str, Any]:
    from orchestrator.engines import find_engine
    from orchestrator.inventory.values import missing, names, texts

    options, kubernetes = node.options(), node.lease == "kubernetes"
    used = dict.fromkeys(n for _, text in texts(options) for n in names(text))
    lacking = {name for _, name in missing(options)}
    return {
        "name": node.name,
        "transport": node.transport,
        "host": (node.host or node.name) if node.transport == "ssh" else None,
        "lease": node.lease,
        "pool": node.pool_words() if node.lease else None,
        "via": node.via,
        "engine": node.engine,
        "image": node.image if (e := find_engine(node.engine)).runs_images or e.enter or kubernetes else None,
        "gpus": node.gpus,
        "labels": list(node.labels),
        "references": {name: name not in lacking for name in used},
    }


def _node_lines(node: dict[str, Any]) -> list[str]:
    where = node["pool"] or (f"ssh to {node['host']}" if node["host"] else "this machine")
    where += f", asked for on {node['via']}" if node["via"] else ""
    engine = "pods" if node["lease"] == "kubernetes" else node["engine"]
    how = f"{engine} with {node['image']}" if node["image"] else "processes"
    gpus = node["gpus"] if isinstance(node["gpus"], (str, int)) else ", ".join(map(str, node["gpus"]))
    labels = f"; labels {', '.join(node['labels'])}" if node["labels"] else ""
    lacking = [name for name, there in node["references"].items() if not there]
    lines = [f"  {node['name']}: {where}, {how}, gpus {gpus}{labels}"]
    return lines + [f"    not set in your environment now: {', '.join(lacking)}"] * bool(lacking)


class RecipeOptions(NamedTuple):
    """Group: the image to make."""

    base: Annotated[str, typer.Option("--base", metavar="IMAGE", help="Your image with ROCm, torch and git.")]
    inventory: Annotated[
        Path | None,
        typer.Option("-i", "--inventory", metavar="INV", help="Nodes that will use it: their image and gfx."),
    ] = None
    tag: Annotated[
        str | None,
        typer.Option("--tag", metavar="IMAGE", help="Name of the new image (default: the inventory's image)."),
    ] = None
    ref: Annotated[str, typer.Option("--ref", metavar="REF", help="Tag, branch or commit of AITER.")] = "main"
    repo: Annotated[
        str | None, typer.Option("--repo", metavar="URL", help="AITER's git repository (default: the public one).")
    ] = None
    gfx: Annotated[
        list[str] | None, typer.Option("--gfx", metavar="GFX", help="Chip to compile for; repeatable (GPU_ARCHS).")
    ] = None
    prebuild: Annotated[
        int,
        typer.Option("--prebuild", metavar="N", help="PREBUILD_KERNELS: 0 at first use, 1 GEMMs and attention now."),
    ] = 0
    jobs: Annotated[int | None, typer.Option("--jobs", min=1, metavar="N", help="Compilers at once (MAX_JOBS).")] = None
    table: Annotated[
        list[Path] | None,
        typer.Option("--table", metavar="CSV", help="Tuned table to compile with and use; repeatable."),
    ] = None
    no_requirements: Annotated[
        bool, typer.Option("--no-requirements", help="Skip AITER's requirements.txt: the base image has them.")
    ] = False


def build_image(
    image: RecipeOptions,
    render: Annotated[
        bool, typer.Option("--render", help="Do not build: print the Dockerfile, or write the build folder to --out.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="DIR", help="With --render: folder for Dockerfile, build.sh, tables."),
    ] = None,
    node: Annotated[
        list[str] | None, typer.Option("--node", metavar="N", help="Build on this node; repeatable (default: here).")
    ] = None,
    network: Annotated[
        str | None, typer.Option("--network", metavar="NET", help="Network of the build, such as host.")
    ] = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Build every step again, so that a branch is fresh.")
    ] = False,
    accept_new_host_keys: AcceptNewHostKeysOpt = False,
    json_: JsonOpt = False,
) -> Page | None:
    """Build the image with Docker, here or on nodes.

    Several nodes build one after the other.
    """
    from orchestrator.image.build import HERE
    from orchestrator.image.build import build as run
    from orchestrator.inventory.load import load_inventory

    known = load_inventory(image.inventory) if image.inventory is not None else None
    if render:
        _render(_recipe(known, image), out)
        return None
    if out is not None:
        raise InputError("--out is the folder that --render writes: add --render")
    if node and known is None:
        raise InputError("--node needs the inventory that has it: -i INV")
    strange = [n for n in node or () if known is not None and n not in known.nodes]
    if strange:
        raise InputError(
            f"the inventory has no node {strange[0][:60]!r} (there: {', '.join(known.nodes) if known else ''})"
        )
    recipe = _recipe(known, image)
    flags = [*(["--network", network] if network else []), *(["--no-cache"] if no_cache else [])]
    built = {}
    for where in node or [HERE]:

        def log(line: str, where: str = where) -> None:
            print(f"[{where}] {plain(line)}", file=sys.stderr if json_ else sys.stdout, flush=True)

        of = known.nodes[where] if known is not None and node else None
        built[where] = run(recipe, of, flags, log, accept_new_host_keys=accept_new_host_keys)
        log(f"built {recipe.tag}: {built[where]}")
    return Page({"image": recipe.tag, "built": built})


def _render(recipe: Recipe, out: Path | None) -> None:
    if out is None:
        sys.stdout.write(recipe.dockerfile())
        return
    from orchestrator.transport.local import LocalTransport

    LocalTransport("this machine").put(str(out), recipe.files(("docker",), ()))
    print(f"written: {out}; build it with: sh {out}/build.sh")


def _recipe(known: Inventory | None, image: RecipeOptions) -> Recipe:
    from orchestrator.engines import find_engine
    from orchestrator.image.build import AITER_REPO, Recipe
    from orchestrator.inventory.values import has_reference

    nodes = list(known.nodes.values()) if known else []
    tag = image.tag
    if tag is None:
        images = {
            n.image for n in nodes if find_engine(n.engine).runs_images and n.image and not has_reference(n.image)
        }
        if len(images) != 1:
            why = f"the nodes have {', '.join(sorted(images))}" if images else "no node names an image"
            raise InputError(f"the name of the new image is ambiguous ({why}): give --tag")
        tag = images.pop()
    chips = image.gfx or list(dict.fromkeys(n.gfx for n in nodes if n.gfx))
    return Recipe(
        base=image.base,
        tag=tag,
        gfx=tuple(chips),
        repo=image.repo or AITER_REPO,
        ref=image.ref,
        prebuild=image.prebuild,
        jobs=image.jobs,
        requirements=not image.no_requirements,
        tables=tuple(image.table or ()),
    )
