"""`gemmfleet inventory`: check an inventory without contacting a node, or print the schema of inventories."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from orchestrator.cli.options import JsonOpt
from orchestrator.cli.printer import print_page
from orchestrator.engines import find_engine
from orchestrator.errors import InputError, InventoryError
from orchestrator.inventory import load as inventories
from orchestrator.inventory.model import Inventory, Node, dumps
from orchestrator.inventory.references import reference_names, texts, unset_references
from orchestrator.machines.gpu_names import refuse_one_gpu_twice
from orchestrator.pages import Page
from worker.text import plural


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
    if schema:
        print(dumps(), end="")
        return None
    path = inventories.inventory_path(file)
    try:
        inventory = _load_checked(path, with_environment=env)
    except InputError as e:
        faults = list(e.faults)
        if env:
            faults += _other_unset_variables(path, str(e))
        if json_:
            print_page(Page({"ok": False, "file": str(path), "faults": faults}), as_json=True)
        raise InventoryError(faults) from e
    nodes = [_describe_node(node) for node in inventory.nodes.values()]
    defaults = {"family": inventory.defaults.family, "tuner": inventory.defaults.tuner}
    page = Page({"ok": True, "file": inventory.source, **defaults, "nodes": nodes})
    page.line(f"{inventory.source}: good, {plural(len(nodes), 'node')}")
    for node in nodes:
        page.line(*_node_lines(node))
    return page


def _load_checked(path: Path, *, with_environment: bool) -> Inventory:
    """Return an inventory. Raises InputError for what `tune` would refuse; `with_environment`: also unset variables."""
    inventory = inventories.load_inventory(path)
    refuse_one_gpu_twice(inventory.nodes, {})
    inventories.check_identities(inventory.nodes.values())
    if with_environment:
        inventories.check_references(inventory.nodes.values())
    return inventory


def _other_unset_variables(path: Path, message: str) -> list[str]:
    """Return a fault for each unset variable of the inventory that the message does not name."""
    unset = inventories.unset_variables(path)
    return [fault for name, fault in unset.items() if f"{{env:{name}}}" not in message]


def _describe_node(node: Node) -> dict[str, Any]:
    """Return the node as it stands in the document of --json. `references`: whether each variable of it is set."""
    options = node.options()
    engine = find_engine(node.engine)
    uses_image = engine.runs_images or engine.enter or node.lease == "kubernetes"
    unset = {name for _, name in unset_references(options)}
    return {
        "name": node.name,
        "transport": node.transport,
        "host": (node.host or node.name) if node.transport == "ssh" else None,
        "lease": node.lease,
        "pool": node.pool_words() if node.lease else None,
        "via": node.via,
        "engine": node.engine,
        "image": node.image if uses_image else None,
        "gpus": node.gpus,
        "labels": list(node.labels),
        "references": {name: name not in unset for _, text in texts(options) for name in reference_names(text)},
    }


def _node_lines(node: dict[str, Any]) -> list[str]:
    """Return `  n1: ssh to n1, docker with IMAGE, gpus all`, and the variables that it lacks."""
    where = node["pool"] or (f"ssh to {node['host']}" if node["host"] else "this machine")
    if node["via"]:
        where += f", asked for on {node['via']}"
    engine = "pods" if node["lease"] == "kubernetes" else node["engine"]
    software = f"{engine} with {node['image']}" if node["image"] else "processes"
    gpus = node["gpus"] if isinstance(node["gpus"], (str, int)) else ", ".join(map(str, node["gpus"]))
    line = f"  {node['name']}: {where}, {software}, gpus {gpus}"
    if node["labels"]:
        line += f"; labels {', '.join(node['labels'])}"
    unset = [name for name, is_set in node["references"].items() if not is_set]
    if not unset:
        return [line]
    return [line, f"    not set in your environment now: {', '.join(unset)}"]
