"""Preparation of a bench, and its alternation between container images of the worker on one slot.

Interpreters of one node alternate inside the worker (worker/bench/tuner.py). An image is a container, so images
alternate pass by pass: each pass is a run of its own with one round over all shapes, in an order drawn anew, and equal
pass numbers are paired. Everything happens on one slot: the first of the first usable node.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.bench import request
from orchestrator.engines import find_engine
from orchestrator.errors import InputError
from orchestrator.families import get_family
from orchestrator.inventory import load_inventory
from orchestrator.ledger import LedgerReader
from orchestrator.paths import RunPaths, new_run_id
from orchestrator.results.bench import Result, combined, environments, results
from orchestrator.run.prepare import Prepared, RunRequest, prepare
from orchestrator.shapes import Shape, read_shapes
from orchestrator.shapes.model import render_shapes
from orchestrator.templating import data_folder
from worker.families import Family
from worker.protocol.bench import Rule, lodge


def prepared(run_request: RunRequest, wanted: request.BenchRequest) -> Prepared:
    """A bench that is ready to be created and driven. Raises what `prepare` raises."""
    family = _family(run_request)
    listed = read_shapes(run_request.shapes, family)
    options, texts = lodge(request.options(wanted, family, listed.shapes))
    return prepare(replace(run_request, options=options, texts=texts, bench=True))


@dataclass(frozen=True, slots=True)
class Alternation:
    """Several images of the worker on one slot: one inventory an image, each of them with that slot alone."""

    run_request: RunRequest
    wanted: request.BenchRequest
    stacks: Sequence[request.Stack]
    inventories: dict[str, Path]
    root: RunPaths
    family: Family


def alternation_of(
    first: Prepared, run_request: RunRequest, wanted: request.BenchRequest, stacks: Sequence[request.Stack]
) -> Alternation:
    """Make the folder of an alternation and its inventories. Raises InputError."""
    node = first.nodes[0]
    root = _folder(run_request.runs)
    gpus = [int(node.slots[0])] if node.devices[node.slots[0]]["HIP_VISIBLE_DEVICES"] else 0
    inventories = {s.name: inventory_of(first.inventory_path, root, s, node.node, gpus) for s in stacks}
    return Alternation(run_request, wanted, stacks, inventories, root, first.family)


def refuse_other_engines(first: Prepared) -> None:
    """Raise InputError where the node of an alternation does not run images."""
    node = first.nodes[0]
    if not find_engine(node.engine).runs_images:
        raise InputError(f"--env with images: node {node.node} has engine {node.engine}; only docker runs images")


class Passes:
    """The passes so far. `drive` runs one of them to its end and returns its state."""

    def __init__(self, of: Alternation, drive: Callable[[RunPaths, str], str]) -> None:
        self._of, self._drive = of, drive
        self._rule = Rule(of.wanted.runs, of.wanted.extra, of.wanted.stability)
        self._parts: list[Result] = []
        self.stacks: dict[str, dict[str, Any]] = {s.name: {} for s in of.stacks}

    def go(self, shapes: Sequence[Shape]) -> str:
        """Run passes until the runs agree or none is left; return `finished` or `interrupted`."""
        rng = random.Random(self._of.root.run)
        left = list(shapes)
        for number in range(self._rule.runs + self._rule.extra):
            if number >= self._rule.runs:
                loose = {r.key for r in self.found() if r.status == "unstable"}
                left = [s for s in left if s.key in loose]
            if not left:
                break
            order = list(self._of.stacks)
            rng.shuffle(order)
            for stack in order:
                if self._one(stack, number, left) != "finished":
                    return "interrupted"
        return "finished"

    def found(self) -> list[Result]:
        """Return the results of all passes together, by shape and by environment in the order of `--env`."""
        order = list(self.stacks)
        return sorted(combined(self._parts, self._rule), key=lambda r: (r.shape, order.index(r.env)))

    def _one(self, stack: request.Stack, number: int, shapes: Sequence[Shape]) -> str:
        of = self._of
        listed = of.root.root / f"shapes-{number + 1}.csv"
        listed.write_text(render_shapes(shapes, of.family))
        wanted = replace(of.wanted, envs=(), runs=1, extra=0, more={**of.wanted.more, "first": number})
        run_request = replace(of.run_request, shapes=listed, inventory=of.inventories[stack.name], limit=None)
        paths = prepared(run_request, wanted).create()
        state = self._drive(paths, f"pass {number + 1}, {stack.name} ({stack.image})")
        with LedgerReader.open_readonly(paths.ledger) as ledger:
            self._parts += [replace(r, env=stack.name) for r in results(ledger, Rule(1, 0, 1.0))]
            self.stacks[stack.name] = {**next(iter(environments(ledger).values()), {}), "image": stack.image}
            self.stacks[stack.name]["variables"] = dict(stack.variables)
        return state


def inventory_of(source: Path, root: RunPaths, stack: request.Stack, node: str, gpus: list[int] | int) -> Path:
    """The inventory with that image and its variables, one node of it, and one of its GPUs."""
    import yaml

    raw = yaml.safe_load(source.read_text())
    mine = dict((raw.get("nodes") or {}).get(node) or {})
    env = {**(mine.get("env") or {}), **stack.variables}
    raw["nodes"] = {node: {**mine, "image": stack.image, "gpus": gpus, **({"env": env} if env else {})}}
    path = root.root / f"inventory-{stack.name}.yaml"
    path.write_text(yaml.safe_dump(raw, sort_keys=False))
    load_inventory(path)
    return path


def _folder(runs: Path) -> RunPaths:
    root = RunPaths(runs / f"bench-{new_run_id(time.time())}")
    try:
        runs.mkdir(parents=True, exist_ok=True)
        os.mkdir(root.root, 0o700)
    except OSError as e:
        raise InputError(f"cannot make the folder {root.root}: {e.strerror}") from e
    return root


def _family(run_request: RunRequest) -> Family:
    inventory = run_request.inventory or data_folder("inventories") / "local.yaml"
    return get_family(run_request.family or load_inventory(inventory).defaults.family)
