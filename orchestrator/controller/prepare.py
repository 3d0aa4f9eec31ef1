"""Prepares a run from the user's request: reads, checks, removes duplicates and tuned shapes, groups, costs, orders.

`prepare` calls, in this order: `read_inputs` (inventory, tuner, shapes), `ask_machines` (nodes and pools),
`_choose_shapes` (what is skipped), and then makes the plan. Nothing is written before `PreparedRun.create`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from orchestrator import __version__
from orchestrator.command_hints import command
from orchestrator.controller.prepared_run import PreparedRun
from orchestrator.controller.request import RunRequest
from orchestrator.controller.run_inputs import RunInputs, read_inputs
from orchestrator.controller.run_machines import RunMachines, ask_machines
from orchestrator.errors import InputError
from orchestrator.families import get_tuner
from orchestrator.inventory.load import inventory_path, load_inventory
from orchestrator.leases.pools import pool_note
from orchestrator.ledger.cost_samples import gather_cost_samples
from orchestrator.machines.node_plan import device_memory
from orchestrator.paths import RunConfig, new_run_id
from orchestrator.planning.cost import CostModel
from orchestrator.planning.plan import make_plan, memory_note, queue_of, risk_notes
from orchestrator.planning.roofline import Device, chip_of
from orchestrator.planning.skipped_shapes import Dropped, drop_tuned, tuned_times
from orchestrator.planning.worth import Forecast, Worth, estimate_worths
from orchestrator.results.recheck import chip_of_rows
from orchestrator.shapes.model import COUNT, NOW, Key, Shape, ShapeList, numbers
from orchestrator.shapes.reader import family_of_list
from orchestrator.tables.mixing import not_for_aiter
from worker.families import FAMILIES, Family
from worker.tuners.catalog import recorded_tuner


def prepare(request: RunRequest) -> PreparedRun:
    """Check and plan a run. Every fault of the user's input is raised here, before anything is written."""
    inputs = read_inputs(request)
    run = new_run_id(time.time())
    machines = ask_machines(request, inputs, run)
    family = inputs.family
    gfx, cu_num = machines.chip(inputs.inventory)
    dropped = _choose_shapes(request, inputs.listed, family, gfx, cu_num)
    worth: dict[int, Worth] = {}
    if request.by_value:
        tuned = tuned_times(request.db, family, gfx, cu_num)
        worth = _worths(inputs.listed, dropped.skipped, tuned, family, (gfx, cu_num or None))
    memory = None if machines.pools else device_memory(machines.usable, machines.facts)
    cost = replace(_fitted_cost(request, inputs, gfx), memory=memory or 0)
    plan = make_plan(
        dropped.todo,
        family,
        cost,
        machines.slots(),
        tuner=inputs.tuner,
        chip=(gfx, cu_num),
        skipped=dropped.skipped,
        values={shape: value.value for shape, value in worth.items()},
    )
    queues = [queue_of(pool.name) for pool in machines.pools]
    plan = replace(
        plan,
        notes=tuple(_notes(inputs, machines, dropped, memory)),
        leases={pool.name: pool.count[1] for pool in machines.pools},
        waits_for=(*machines.occupied, *queues),
    )
    return PreparedRun(
        request,
        _run_config(request, inputs, run),
        family,
        inputs.listed,
        plan,
        cost,
        machines.nodes,
        inputs.inventory_path,
        inputs.inventory_text,
        machines.reports,
        worth,
    )


def _fitted_cost(request: RunRequest, inputs: RunInputs, gfx: str) -> CostModel:
    """The cost model for the request, fitted to earlier runs."""
    samples = gather_cost_samples(request.runs, inputs.family, inputs.tuner, gfx)
    cost = CostModel.default(inputs.tuner, inputs.family, gfx).fit(*samples)
    return cost.scaled(request.share * recorded_tuner(inputs.tuner).cost_factor(request.options))


def _choose_shapes(request: RunRequest, listed: ShapeList, family: Family, gfx: str, cu_num: int) -> Dropped:
    """The shapes to tune and those to skip. A recheck measures only the shapes of its rows."""
    if request.rows is None:
        return drop_tuned(listed.shapes, family, request.db, gfx, cu_num, retune=request.retune)
    chip = chip_of_rows(request.rows, *family.chip(gfx, cu_num))
    todo = [shape for shape in listed.shapes if (*chip, *shape.key) in request.rows]
    others = [shape for shape in listed.shapes if (*chip, *shape.key) not in request.rows]
    return Dropped(todo, others, [])


def _notes(inputs: RunInputs, machines: RunMachines, dropped: Dropped, memory: int | None) -> list[str]:
    """Sentences for the user: on the list, what is skipped, risks, nodes and pools."""
    family, tuner, todo = inputs.family, inputs.tuner, dropped.todo
    return [
        *inputs.listed.notes,
        *dropped.notes,
        *risk_notes(family, (shape.key for shape in todo), tuner),
        *memory_note(todo, family, memory),
        *(problem for report in machines.reports for problem in report.problems()),
        *(pool_note(inputs.inventory.nodes[r.node], r) for r in machines.pool_reports if r.usable),
        *not_for_aiter(tuner, ((plan.node, plan.gfx) for plan in machines.usable)),
    ]


def _run_config(request: RunRequest, inputs: RunInputs, run: str) -> RunConfig:
    err_ratio = request.err_ratio
    if err_ratio is None:
        err_ratio = inputs.spec.err_ratio(inputs.family.name)
    return RunConfig(
        run=run,
        created=time.time(),
        argv=request.argv,
        version=__version__,
        family=inputs.family.name,
        tuner=inputs.tuner,
        shapes=inputs.listed.source,
        shapes_sha256=inputs.listed.sha256,
        inventory=str(inputs.inventory_path),
        db=str(request.db.absolute()) if request.db else None,
        err_ratio=err_ratio,
        options=inputs.options,
        **request.settings(),
    )


def prepare_each(request: RunRequest, lists: Sequence[Path]) -> list[PreparedRun]:
    """Check and plan a run for each family of the lists. Raises what `prepare` raises.

    A list's name or columns show its family, else the request does. For a single list the request comes first.
    """
    defaults = load_inventory(inventory_path(request.inventory)).defaults
    spec = get_tuner(request.tuner or defaults.tuner)
    known = spec.families(request.options) if spec.families else FAMILIES
    by_family: dict[str, list[Path]] = {}
    for path in lists:
        asked = request.family if len(lists) == 1 else None
        family = asked or family_of_list(path, known) or request.family or defaults.family
        by_family.setdefault(family, []).append(path)
    if len(by_family) > 1 and (request.db is not None or request.gpu_hours is not None):
        raise InputError(f"--db and --gpu-hours are for one family, and these lists are of {', '.join(by_family)}")
    runs = []
    for family, (shapes, *more) in by_family.items():
        runs.append(prepare(replace(request, family=family, shapes=shapes, more=more)))
    return runs


def _worths(
    listed: ShapeList, skipped: Sequence[Shape], tuned: Mapping[Key, float], family: Family, device: Device
) -> dict[int, Worth]:
    """The worth of every listed shape. `tuned`: times in the DB. Raises InputError if the list has no calls."""
    calls = numbers(listed, COUNT)
    if not calls:
        raise InputError(
            f"{listed.source}: --by-value needs a column {COUNT}, the calls of each shape in the workload;"
            f" {command('shapes from-log')} and {command('shapes capture')} write it"
        )
    forecast = Forecast(family, tuned, chip_of(device)[0])
    return estimate_worths(listed.shapes, calls, {**numbers(listed, NOW), **tuned}, forecast, {s.id for s in skipped})
