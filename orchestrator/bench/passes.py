"""Sides that are images of the worker, in turn on one slot.

Sides of one node alternate inside its worker (worker/bench/tuner.py). An image is a container, so images alternate pass
by pass: each pass is a run of its own with one round over all shapes, in an order drawn anew, and equal pass numbers
are paired. Everything happens on one slot: the first of the first usable node.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from orchestrator.engines import find_engine
from orchestrator.errors import InputError
from orchestrator.inventory import load_inventory
from orchestrator.ledger import LedgerReader, ProfileRow
from orchestrator.paths import RunPaths, new_run_id
from orchestrator.results.bench import BenchResults, environments, results, rule_of, settled_rows
from orchestrator.run.prepare import Prepared, RunRequest, prepare
from orchestrator.shapes.model import render_shapes
from worker.protocol.bench import Side


def refuse_other_engines(first: Prepared) -> None:
    """Raise InputError where the node does not run images."""
    node = first.nodes[0]
    if not find_engine(node.engine).runs_images:
        raise InputError(f"--env with images: node {node.node} has engine {node.engine}; only docker runs images")


def run_passes(
    first: Prepared, request: RunRequest, sides: Sequence[Side], drive: Callable[[RunPaths, str], str]
) -> tuple[BenchResults, str]:
    """Run passes until the runs agree or none is left; their results, and `finished` or `interrupted`.

    `drive` runs one pass to its end and returns its state. Raises what a run raises.
    """
    root = RunPaths(request.runs / f"bench-{new_run_id(time.time())}")
    try:
        request.runs.mkdir(parents=True, exist_ok=True)
        os.mkdir(root.root, 0o700)
    except OSError as e:
        raise InputError(f"cannot make the folder {root.root}: {e.strerror}") from e
    node = first.nodes[0]
    gpus = [int(node.slots[0])] if node.devices[node.slots[0]]["HIP_VISIBLE_DEVICES"] else 0
    inventory = one_slot(first.inventory_path, root.root / "inventory.yaml", node.node, gpus)
    rule, rng, left = rule_of(request.options), random.Random(root.run), list(first.listed.shapes)
    rows: list[ProfileRow] = []
    stacks: dict[str, dict[str, Any]] = {s.name: {} for s in sides}

    def so_far() -> BenchResults:
        return BenchResults(root, first.family, results(rows, rule, list(stacks)), stacks, len(first.listed.shapes))

    for number in range(rule.runs + rule.extra):
        if number >= rule.runs:
            loose = {r.key for r in so_far().found if r.status == "unstable"}
            left = [s for s in left if s.key in loose]
        if not left:
            break
        shapes = root.root / f"shapes-{number + 1}.csv"
        shapes.write_text(render_shapes(left, first.family))
        for side in rng.sample(sides, len(sides)):
            options = {**request.options, "sides": [asdict(side)], "runs": 1, "extra": 0, "first": number}
            asked = replace(
                request, shapes=shapes, inventory=inventory, image=side.image, limit=None, options=options
            )  # fmt: skip
            paths = prepare(asked).create()
            state = drive(paths, f"pass {number + 1}, {side.name} ({side.image})")
            with LedgerReader.open_readonly(paths.ledger) as ledger:
                rows += settled_rows(ledger)
                stacks |= environments(ledger)
            if state != "finished":
                return so_far(), "interrupted"
    return so_far(), "finished"


def one_slot(source: Path, path: Path, node: str, gpus: list[int] | int) -> Path:
    """Write an inventory with one node of another one, and one of its GPUs."""
    raw = yaml.safe_load(source.read_text())
    raw["nodes"] = {node: {**((raw.get("nodes") or {}).get(node) or {}), "gpus": gpus}}
    path.write_text(yaml.safe_dump(raw, sort_keys=False))
    load_inventory(path)
    return path
