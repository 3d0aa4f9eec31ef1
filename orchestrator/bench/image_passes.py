"""Benches software stacks that are images of the worker: they take turns on one slot.

An image is a container, so images alternate pass by pass. Each pass is a run of its own with one round over all shapes,
in an order drawn anew; equal pass numbers are paired. Everything happens on one slot, the first of the first usable
node. The command calls `refuse_other_engines`, then `run_passes`. Other stacks alternate inside a worker
(worker/bench/tuner.py).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import yaml

from orchestrator.controller.prepare import prepare
from orchestrator.controller.prepared_run import PreparedRun
from orchestrator.controller.request import RunRequest
from orchestrator.engines import find_engine
from orchestrator.errors import InputError
from orchestrator.ledger.reader import LedgerReader, ProfileRow
from orchestrator.pages import Document
from orchestrator.paths import RunPaths, create_run_folder, new_run_id
from orchestrator.results.bench import BenchResults, environments, join_runs, rule_of, settled_rows
from orchestrator.shapes.model import render_shapes
from worker.protocol.bench import Side


def refuse_other_engines(first: PreparedRun) -> None:
    """Raise InputError if a node's engine does not run images."""
    for node in first.nodes:
        if not find_engine(node.engine).runs_images:
            raise InputError(f"--env with images: node {node.node} has engine {node.engine}; only docker runs images")


def run_passes(
    first: PreparedRun, request: RunRequest, sides: Sequence[Side], drive: Callable[[RunPaths, str], str]
) -> tuple[BenchResults, str]:
    """Run passes until the times of each shape agree or no pass is left. Returns the results of all passes, and
    `finished` or `interrupted`.

    `first`: the prepared run of the whole request, of which we need the shapes and the nodes. `drive` runs one pass to
    its end and returns its state. Raises what a run raises.
    """
    root = create_run_folder(request.runs, f"bench-{new_run_id(time.time())}")
    inventory = _inventory_of_slot(first, root)
    rule = rule_of(request.options)
    order = random.Random(root.run)
    shapes = list(first.listed.shapes)
    rows: list[ProfileRow] = []
    stacks: dict[str, Document] = {side.name: {} for side in sides}

    def results_so_far() -> BenchResults:
        results = join_runs(rows, rule, list(stacks))
        return BenchResults(root, first.family, results, stacks, len(first.listed.shapes))

    for number in range(rule.runs + rule.extra):
        if number >= rule.runs:  # an extra pass: only over shapes whose times disagree so far
            unstable = {result.key for result in results_so_far().results if result.status == "unstable"}
            shapes = [shape for shape in shapes if shape.key in unstable]
        if not shapes:
            break
        shapes_file = root.root / f"shapes-{number + 1}.csv"
        shapes_file.write_text(render_shapes((shape.key for shape in shapes), first.family))
        for side in order.sample(sides, len(sides)):
            options = {**request.options, "sides": [asdict(side)], "runs": 1, "extra": 0, "first": number}
            of_pass = replace(
                request, shapes=shapes_file, inventory=inventory, image=side.image, limit=None, options=options
            )
            paths = prepare(of_pass).create()
            state = drive(paths, f"pass {number + 1}, {side.name} ({side.image})")
            with LedgerReader.open_readonly(paths.ledger) as ledger:
                rows += settled_rows(ledger)
                stacks |= environments(ledger)
            if state != "finished":
                return results_so_far(), "interrupted"
    return results_so_far(), "finished"


def _inventory_of_slot(first: PreparedRun, root: RunPaths) -> Path:
    """Write the inventory of the slot on which all passes run."""
    node = first.nodes[0]
    slot = node.slots[0]
    gpus = [int(slot)] if node.devices[slot]["HIP_VISIBLE_DEVICES"] else 0
    return one_slot(first.inventory_path, root.root / "inventory.yaml", node.node, gpus)


def one_slot(source: Path, path: Path, node: str, gpus: list[int] | int) -> Path:
    """Write an inventory with one node of another one, and one of its GPUs (0: the CPU)."""
    raw = yaml.safe_load(source.read_text())
    raw["nodes"] = {node: {**((raw.get("nodes") or {}).get(node) or {}), "gpus": gpus}}
    path.write_text(yaml.safe_dump(raw, sort_keys=False))
    return path
