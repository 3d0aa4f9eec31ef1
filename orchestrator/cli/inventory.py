"""`gemmfleet inventory check`: what an inventory means, or all that is wrong with it; or the schema of inventories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.options import JsonOpt
from worker.text import plural

if TYPE_CHECKING:
    from orchestrator.inventory import Inventory, Node


def check(
    file: Annotated[
        Path | None, typer.Argument(metavar="[INVENTORY.yaml]", help="Default: inventories/local.yaml.")
    ] = None,
    env: Annotated[
        bool, typer.Option("--env", help="Also check the values of all ${env:NAME}, as they are now.")
    ] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of inventories instead, for editors.")
    ] = False,
    as_json: JsonOpt = False,
) -> None:
    """Check an inventory as `tune` reads it; contacts no node.

    Prints what it means, or all that is wrong (exit code 2).
    """
    from orchestrator.errors import InputError
    from orchestrator.inventory import check_references, load_inventory
    from orchestrator.inventory.model import dumps
    from orchestrator.nodes.occupancy import refuse_one_gpu_twice
    from orchestrator.templating import data_folder

    if schema:
        typer.echo(dumps(), nl=False)
        return
    path = file or data_folder("inventories") / "local.yaml"
    try:
        found = load_inventory(path)
        refuse_one_gpu_twice(found.nodes, {})
        if env:
            check_references(found.nodes.values())
    except InputError as e:
        if as_json:
            typer.echo(json.dumps({"ok": False, "file": str(path), "faults": e.faults}))
        raise
    summary = summarise(found)
    typer.echo(json.dumps(summary) if as_json else "\n".join(_lines(summary)))


def summarise(found: Inventory) -> dict[str, Any]:
    """Summary of an inventory and its nodes; references stay unresolved."""
    return {
        "ok": True,
        "file": found.source,
        "family": found.family,
        "tuner": found.tuner,
        "nodes": [_node(node) for node in found.nodes.values()],
    }


def _node(node: Node) -> dict[str, Any]:
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


def _lines(summary: dict[str, Any]) -> list[str]:
    from orchestrator.tables.faults import escaped

    out = [f"{escaped(summary['file'])}: good, {plural(len(summary['nodes']), 'node')}"]
    for node in summary["nodes"]:
        where = node["pool"] or (f"ssh to {node['host']}" if node["host"] else "this machine")
        where += f", asked for on {node['via']}" if node["via"] else ""
        engine = "pods" if node["lease"] == "kubernetes" else node["engine"]
        how = f"{engine} with {node['image']}" if node["image"] else "processes"
        gpus = node["gpus"] if isinstance(node["gpus"], (str, int)) else ", ".join(map(str, node["gpus"]))
        labels = f"; labels {', '.join(node['labels'])}" if node["labels"] else ""
        out.append(f"  {node['name']}: {where}, {how}, gpus {gpus}{labels}")
        lacking = [name for name, there in node["references"].items() if not there]
        if lacking:
            out.append(f"    not set in your environment now: {', '.join(lacking)}")
    return out
