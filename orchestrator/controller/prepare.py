"""Prepares a run from the user's request: reads, checks, removes duplicates and tuned shapes, groups, costs, orders.

`prepare` calls, in this order: `_read_inputs` (inventory, tuner, shapes), `_ask_machines` (nodes and pools),
`_choose_shapes` (what is skipped), and then makes the plan. Nothing is written before `PreparedRun.create`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator import __version__
from orchestrator.command_hints import command
from orchestrator.controller.prepared_run import PreparedRun
from orchestrator.controller.request import RunRequest
from orchestrator.engines import UNUSABLE, WARNING, Finding, find_engine
from orchestrator.errors import InputError, NoUsableNodeError
from orchestrator.families import check_family, check_tuner_options, get_family, get_tuner
from orchestrator.inventory.load import check_references, limit, load_inventory, parse_inventory, with_image
from orchestrator.inventory.model import Inventory, Node
from orchestrator.leases.pools import check_pools, plan_unseen, pool_note, slots_of
from orchestrator.ledger.cost_samples import gather_cost_samples
from orchestrator.machines.facts import NodeFacts
from orchestrator.machines.gpu_names import refuse_one_gpu_twice
from orchestrator.machines.node_check import NodeReport, check_nodes
from orchestrator.machines.node_plan import NodePlan, device_memory, plan_nodes
from orchestrator.machines.occupancy import busy_sentence, gpus_of, mode_of, occupants, occupants_text, what_we_do
from orchestrator.paths import RunConfig, new_run_id
from orchestrator.planning.cost import CostModel
from orchestrator.planning.plan import make_plan, memory_note, queue_of, risk_notes
from orchestrator.planning.roofline import Device, Forecast, Worth, chip_of, estimate_worths
from orchestrator.planning.skipped_shapes import Dropped, drop_tuned, tuned_times
from orchestrator.results.recheck import chip_of_rows
from orchestrator.shapes.captured_routings import read_captured
from orchestrator.shapes.model import COUNT, NOW, Key, Shape, ShapeList, numbers
from orchestrator.shapes.reader import family_of_list, read_shapes, union
from orchestrator.tables.mixing import check_db, not_for_aiter
from orchestrator.templating import data_folder
from worker.aiter_tree.locate import PLACES
from worker.families import FAMILIES, Family
from worker.tuners.catalog import TunerSpec, recorded_tuner

NO_AITER = (
    UNUSABLE,
    "aiter",
    f"there is no AITER: its Python imports none, and none is in {', '.join(PLACES)}",
    "name its folder, `aiter: {root: PATH}`, or a Python that imports it, `python: PATH`",
)

GPUS_UNKNOWN = Finding(UNUSABLE, "gpus", "its GPUs are not known before it is asked", "write their number, `gpus: 8`")
"""The finding on a node that is not asked."""


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


@dataclass(frozen=True, slots=True)
class RunMachines:
    """The machines and pools of a run, as far as they are known."""

    reports: list[NodeReport]
    """On machines, then on pools."""
    pool_reports: list[NodeReport]
    facts: Mapping[str, NodeFacts]
    nodes: list[NodePlan]
    usable: list[NodePlan]
    """Those of `nodes` that can be used."""
    pools: list[Node]
    """Pools that can be used."""

    def chip(self, inventory: Inventory) -> tuple[str, int]:
        """(gfx, cu_num) of the first node, the usable ones first; ("", 0) if it is unknown."""
        candidates: list[NodePlan | Node] = [*self.usable, *self.pools, *self.nodes, *inventory.nodes.values()]
        return candidates[0].gfx or "", candidates[0].cu_num or 0

    def slots(self) -> dict[str, int]:
        """Slots of each usable machine, and of each pool at its largest size."""
        of_machines = {plan.node: len(plan.slots) for plan in self.usable}
        return {**of_machines, **{pool.name: pool.count[1] * slots_of(pool) for pool in self.pools}}


def prepare(request: RunRequest) -> PreparedRun:
    """Check and plan a run. Every fault of the user's input is raised here, before anything is written."""
    inputs = _read_inputs(request)
    run = new_run_id(time.time())
    machines = _ask_machines(request, inputs, run)
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
    occupied = _nodes_to_wait_for(machines.reports, inputs.inventory.without_pools(), request.busy)
    queues = [queue_of(pool.name) for pool in machines.pools]
    plan = replace(
        plan,
        notes=tuple(_notes(inputs, machines, dropped, memory)),
        leases={pool.name: pool.count[1] for pool in machines.pools},
        waits_for=(*occupied, *queues),
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


def _read_inputs(request: RunRequest) -> RunInputs:
    """Read and check what the user gave. Raises InputError."""
    inventory_path = request.inventory or data_folder("inventories") / "local.yaml"
    inventory = load_inventory(inventory_path)
    inventory_text = inventory_path.read_bytes()
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
    return RunInputs(inventory_path, inventory_text, inventory, family, tuner, spec, options, listed)


def _ask_machines(request: RunRequest, inputs: RunInputs, run: str) -> RunMachines:
    """Ask the nodes and schedulers what they have, and plan the nodes. Raises NoUsableNodeError, InventoryError."""
    inventory = inputs.inventory
    machines = inventory.without_pools()
    to_ask = _nodes_to_ask(machines, inputs.spec, request.runs)
    if request.ask:
        reports = check_nodes(to_ask, runs=request.runs, accept_new_host_keys=request.accept_new_host_keys)
        pool_reports = check_pools(inventory, run)
    else:
        unknown = [node for node in to_ask if node.gpus == "auto" and not node.is_here]
        reports = [NodeReport(node.name, (GPUS_UNKNOWN,)) for node in unknown]
        pool_reports = [NodeReport(name, ()) for name, node in inventory.nodes.items() if node.lease]
    _refuse_gpus_with_two_names(machines, reports)
    reports = [_with_occupants(report, machines.nodes[report.node], request.busy) for report in reports]
    if inputs.spec.software == "aiter" and "root" not in inputs.options:
        reports = [r.with_finding(*NO_AITER) if r.facts.values.get("aiter") == "none" else r for r in reports]
    facts = {report.node: report.facts for report in reports}
    nodes = plan_nodes(machines, run, (request.runs / run).absolute(), facts)
    unusable = {report.node for report in reports if not report.usable}
    usable = [node for node in nodes if node.slots and node.node not in unusable]
    reports = [*reports, *pool_reports]
    pools = [inventory.nodes[report.node] for report in pool_reports if report.usable]
    if not usable and not pools and not request.plan:
        problems = [f"  {problem}" for report in reports for problem in report.problems()]
        raise NoUsableNodeError("\n".join(["no node can be used:", *problems]))
    if not request.ask:
        nodes = [*usable, *(plan_unseen(pool, run) for pool in pools)]
    return RunMachines(reports, pool_reports, facts, nodes, usable, pools)


def _nodes_to_ask(machines: Inventory, spec: TunerSpec, runs: Path) -> list[Node]:
    """All machines, but not this one if there is nothing to ask. Here the runs lie in `runs` if no workdir is given."""
    nodes = []
    for node in machines.nodes.values():
        if not node.is_here:
            nodes.append(node)
        elif find_engine(node.engine).runs_images or spec.software:
            nodes.append(node.model_copy(update={"workdir": node.workdir or str(runs.absolute())}))
    return nodes


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
    defaults = load_inventory(request.inventory or data_folder("inventories") / "local.yaml").defaults
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


def _counts(listed: ShapeList) -> dict[str, dict[str, float]]:
    """The option `counts`: the numbers in the column `count` by shape, if the file has it. Raises InputError."""
    counts = numbers(listed, COUNT)
    if not counts:
        return {}
    return {"counts": {"x".join(map(str, key)): count for key, count in counts.items()}}


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


def _refuse_gpus_with_two_names(inventory: Inventory, reports: Sequence[NodeReport]) -> None:
    """Raise InventoryError if two slots are the same GPU. This machine is checked too, if it is not the only node."""
    facts = {report.node: report.facts for report in reports}
    if len(inventory.nodes) > 1:
        here = [n for n in inventory.nodes.values() if n.is_here and n.gpus != 0 and n.name not in facts]
        facts |= {report.node: report.facts for report in check_nodes(here)}
    refuse_one_gpu_twice(inventory.nodes, facts)


def _nodes_to_wait_for(reports: Sequence[NodeReport], machines: Inventory, requested: str | None) -> list[str]:
    """The nodes that the run will wait for, because someone else computes there."""
    names = []
    for report in reports:
        node = machines.nodes.get(report.node)
        if node is None or not report.usable or mode_of(node, requested) != "wait":
            continue
        if occupants(report.facts, gpus_of(node, report.facts), ""):
            names.append(report.node)
    return names


def _with_occupants(report: NodeReport, node: Node, requested: str | None) -> NodeReport:
    """The report, with a finding on what we do about the node's occupants. With `skip` the node counts as unusable."""
    present = occupants(report.facts, gpus_of(node, report.facts), "") if report.usable else ()
    if not present:
        return report
    mode = what_we_do(mode_of(node, requested), present)
    text = busy_sentence("it", mode, occupants_text(present))
    finding = Finding(UNUSABLE if mode == "skip" else WARNING, "busy", text)
    others = [f for f in report.findings if f.about != "busy"]
    return replace(report, findings=(*others, finding))
