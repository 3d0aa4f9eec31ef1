"""Reads and checks what the user gave for a run: the inventory, the family, the tuner with its options, the shapes.

prepare.py calls `read_inputs` first. No node is asked here, and nothing is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.controller.request import RunRequest
from orchestrator.errors import InputError
from orchestrator.families import check_family, check_tuner_options, get_family, get_tuner
from orchestrator.inventory.load import (
    check_references,
    inventory_path,
    limit,
    load_inventory,
    parse_inventory,
    with_image,
)
from orchestrator.inventory.model import Inventory
from orchestrator.shapes.captured_routings import read_captured
from orchestrator.shapes.model import COUNT, ShapeList, numbers
from orchestrator.shapes.reader import read_shapes, union
from orchestrator.tables.mixing import check_db
from worker.families import Family
from worker.tuners.catalog import TunerSpec


@dataclass(frozen=True, slots=True)
class RunInputs:
    """The user's input, read and checked."""

    inventory_path: Path
    inventory_text: bytes
    inventory: Inventory
    family: Family
    tuner: str
    spec: TunerSpec
    options: dict[str, Any]
    listed: ShapeList


def read_inputs(request: RunRequest) -> RunInputs:
    """Read and check what the user gave. Raises InputError."""
    inventory_file = inventory_path(request.inventory)
    inventory = load_inventory(inventory_file)
    inventory_text = inventory_file.read_bytes()
    if request.image is not None:
        inventory_text = with_image(inventory_text, request.image, inventory.source)
        inventory = parse_inventory(inventory_text, inventory.source)
    inventory = limit(inventory, request.limit)
    check_references(inventory.nodes.values())
    family = get_family(request.family or inventory.defaults.family)
    tuner = request.tuner or inventory.defaults.tuner
    spec = get_tuner(tuner, for_tune=not request.bench)
    options = dict(request.options)
    check_tuner_options(spec, options)
    check_family(spec, family.name, options)
    if request.rows is not None and spec.produces == "configs":
        raise InputError(f"the tuner {tuner} writes config files, not a table whose rows could be checked")
    if request.db is not None and not request.bench:
        check_db(request.db, family, tuner)
    lists = [read_shapes(path, family) for path in (request.shapes, *request.more)]
    listed = union(lists) if request.more else lists[0]
    if spec.wants_counts:
        options |= _counts(listed)
    if spec.wants_captures and (folder := options.pop("topk_ids", "")):
        options["captured"] = read_captured(Path(folder), listed, family)
    return RunInputs(inventory_file, inventory_text, inventory, family, tuner, spec, options, listed)


def _counts(listed: ShapeList) -> dict[str, dict[str, float]]:
    """The option `counts`: the numbers in the column `count` by shape, if the file has it. Raises InputError."""
    counts = numbers(listed, COUNT)
    if not counts:
        return {}
    return {"counts": {"x".join(map(str, key)): count for key, count in counts.items()}}
