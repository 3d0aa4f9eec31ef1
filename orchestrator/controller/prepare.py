"""Prepares a run from the user's request: reads, checks, removes duplicates and tuned shapes, groups, costs, orders."""

from __future__ import annotations

import json
import shutil
import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator import __version__
from orchestrator.command_hints import command
from orchestrator.controller.drive import WORTHS
from orchestrator.controller.pools import check_pools, machines_of, plan_unseen, pool_note, slots_of
from orchestrator.engines import UNUSABLE, WARNING, Finding, find_engine
from orchestrator.errors import InputError, LedgerError, NoUsableNodeError, OrchestratorError
from orchestrator.families import check_family, check_tuner_options, get_family, get_tuner
from orchestrator.inventory.load import check_references, limit, load_inventory, parse_inventory, with_image
from orchestrator.inventory.model import Inventory, Node
from orchestrator.ledger.reader import LedgerReader
from orchestrator.ledger.writer import Ledger
from orchestrator.machines.facts import save_facts
from orchestrator.machines.gpu_names import refuse_one_gpu_twice
from orchestrator.machines.node_check import NodeReport, check_nodes
from orchestrator.machines.node_plan import NodePlan, device_memory, plan_nodes
from orchestrator.machines.occupancy import busy_sentence, gpus_of, mode_of, occupants, occupants_text, what_we_do
from orchestrator.paths import RunConfig, RunPaths, create_run_folder, new_run_id
from orchestrator.planning.cost import CostModel, CostSample, weights
from orchestrator.planning.plan import Plan, make_plan, memory_note, queue_of, risk_notes
from orchestrator.planning.roofline import Device, Forecast, Worth, chip_of, worths
from orchestrator.results.recheck import RowToCheck, chip_of_rows, rows_to_check
from orchestrator.shapes.model import COUNT, NOW, Key, Shape, ShapeList, annotations_csv, numbers
from orchestrator.shapes.reader import family_of_list, read_shapes, union
from orchestrator.tables.locate import open_sources
from orchestrator.tables.merge import check_db, not_for_aiter
from orchestrator.tables.tuned import Key as TableKey
from orchestrator.tables.tuned import Table, chip_name, read_table
from orchestrator.templating import data_folder
from worker.aiter_tree.locate import PLACES
from worker.families import FAMILIES, Family
from worker.tuners.catalog import recorded_tuner

NO_AITER = (
    UNUSABLE,
    "aiter",
    f"there is no AITER: its Python imports none, and none is in {', '.join(PLACES)}",
    "name its folder, `aiter: {root: PATH}`, or a Python that imports it, `python: PATH`",
)


class Dropped(NamedTuple):
    """Shapes split into `todo` and `skipped`, in their order. `notes`: sentences for the user."""

    todo: list[Shape]
    skipped: list[Shape]
    notes: list[str]


def drop_tuned(
    shapes: Sequence[Shape], family: Family, db: Path | None, gfx: str, cu_num: int, *, retune: bool = False
) -> Dropped:
    """Skip shapes whose key `db` has for exactly this gfx and cu_num, with a time above 0.

    Without `db`, or with `retune`, no shape is skipped. Raises TunedDBError if the file is not a tuned table of the
    family.
    """
    todo = list(shapes)
    if db is None:
        return Dropped(todo, [], [])
    if not db.exists():
        return Dropped(todo, [], [f"{db} does not exist yet: nothing is skipped, and it will be created"])
    table = read_table(db, family)
    notes = list(table.notes)
    if retune:
        return Dropped(todo, [], notes)
    chip, there = family.chip(gfx, cu_num), _times(table, family, gfx, cu_num)
    if table.rows and not any(r.key[:2] == chip for r in table.rows):
        has = sorted({chip_name(*r.key[:2]) for r in table.rows})
        mine = f"{gfx} with cu_num {cu_num}" if chip[1] else gfx
        notes.append(f"{db} has no row for {mine} (it has {', '.join(has[:6])}): nothing is skipped")
    skipped = [s for s in todo if s.key in there]
    return Dropped([s for s in todo if s.key not in there], skipped, notes)


def tuned_times(db: Path | None, family: Family, gfx: str, cu_num: int) -> dict[Key, float]:
    """Microseconds of a chip's rows in the table, by key; {} if there is no table. Raises TunedDBError."""
    return _times(read_table(db, family), family, gfx, cu_num) if db is not None and db.exists() else {}


def _times(table: Table, family: Family, gfx: str, cu_num: int) -> dict[Key, float]:
    chip = family.chip(gfx, cu_num)
    return {r.key[2:]: r.us for r in table.rows if r.key[:2] == chip and r.us is not None and not r.tag}


NEWEST_RUNS = 12
MOST_SHAPES = 20_000
LONGEST_START_S = 900.0
"""Longer starts are left out: they waited for something that may not happen again."""

_DONE = """SELECT json_extract(j.data, '$.attempt'), json_extract(j.data, '$.seconds'), r.spent, r.device
    FROM journal j LEFT JOIN reports r ON r.attempt = json_extract(j.data, '$.attempt')
    WHERE j.type='AttemptEnded' AND json_extract(j.data, '$.outcome')='done' ORDER BY j.id DESC LIMIT 2000"""
_FIRST = """SELECT t, json_extract(data, '$.attempt') FROM journal WHERE type='AttemptStarted' ORDER BY id LIMIT 1"""
_LAST = "SELECT max(t) FROM journal WHERE type='AttemptEnded'"
_MEASURED = "SELECT s.key FROM shapes s WHERE s.id IN (SELECT DISTINCT shape FROM rows WHERE attempt=?)"


def gather(runs: Path, family: Family, tuner: str, gfx: str | None = None) -> tuple[list[CostSample], list[float]]:
    """Cost samples from attempts of the newest runs in a folder with this family, tuner and (if given) gfx. Also the
    seconds that each run took until its first group and after its last.

    Unreadable ledgers are skipped. At most MOST_SHAPES shapes are read.
    """
    if not runs.is_dir():
        return [], []
    ledgers = sorted(runs.glob("*/ledger.db"), key=lambda p: (_mtime(p), p.parent.name), reverse=True)
    out: list[CostSample] = []
    starts: list[float] = []
    used = 0
    for path in ledgers[: 4 * NEWEST_RUNS]:
        try:
            found, start = _of_ledger(path, family, tuner, gfx)
        except (OrchestratorError, OSError, ValueError, KeyError, TypeError):
            continue
        used += bool(found)
        out += found
        if found and 0.0 < start <= LONGEST_START_S:
            starts.append(start)
        if used >= NEWEST_RUNS or sum(s.shapes for s in out) >= MOST_SHAPES:
            break
    return out, starts


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _of_ledger(path: Path, family: Family, tuner: str, gfx: str | None) -> tuple[list[CostSample], float]:
    out: list[CostSample] = []
    shapes = 0
    with LedgerReader.open_readonly(path, at_rest=True) as ledger:
        if ledger.meta("family") != family.name or ledger.meta("tuner") != tuner:
            return [], 0.0
        times = float(ledger.meta("units", 1.0))
        for attempt, seconds, spent, device in ledger.query(_DONE):
            if not seconds:
                continue
            if gfx is not None and json.loads(device or "{}").get("gfx") != gfx:
                continue
            keys = [
                dict(zip(family.key_names, json.loads(k), strict=True)) for (k,) in ledger.query(_MEASURED, (attempt,))
            ]
            measuring = float(seconds) - _importing(float(seconds), json.loads(spent or "{}"))
            if keys and measuring > 0:
                flops, elements = sum(map(family.flops, keys)), sum(weights(k, family) for k in keys)
                out.append(CostSample(times * len(keys), times * flops, times * elements, measuring, path.parent.name))
                shapes += len(keys)
            if shapes >= MOST_SHAPES:
                break
        return out, _start_s(ledger)


def _importing(seconds: float, spent: Mapping[str, float]) -> float:
    """Seconds of an attempt in which its process imported modules; 0 if it had imported them before (it still reports
    the time)."""
    kinds = {k: float(v) for k, v in spent.items() if k != "start"}
    return kinds.get("import", 0.0) if sum(kinds.values()) <= 1.05 * seconds else 0.0


def _start_s(ledger: LedgerReader) -> float:
    """Seconds of the run in which no slot worked on a shape: before its first attempt and after its last."""
    created, first = ledger.meta("created"), ledger.query(_FIRST)
    if not first or created is None:
        return 0.0
    started, attempt = first[0]
    last = ledger.query(_LAST)[0][0] or started
    seconds = [s for a, s, *_ in ledger.query(_DONE) if a == attempt]
    spent = ledger.report(attempt).spent
    importing = _importing(float(seconds[0] if seconds else 0.0), spent)
    return float(started) - float(created) + importing + max(0.0, float(ledger.meta("ended", last)) - float(last))


@dataclass(frozen=True, slots=True)
class RunRequest:
    """The user's request: the options of `tune`."""

    shapes: Path
    runs: Path
    inventory: Path | None = None
    family: str | None = None
    tuner: str | None = None
    db: Path | None = None
    retune: bool = False
    limit: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    err_ratio: float | None = None
    watchdog_s: float = 300.0
    grace_s: float = 30.0
    accept_new_host_keys: bool = False
    lost_after_s: float = 90.0
    busy: str | None = None
    hold: bool = False
    """Keep idle leases."""
    argv: list[str] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    """Long texts that the options refer to, by hash."""
    ask: bool = True
    """Ask nodes and schedulers what they have. Else `Prepared.nodes` is what is known without, leases included."""
    plan: bool = False
    """Only plan. Without a usable node the plan has no slot, and its notes say why."""
    bench: bool = False
    """The request is from `bench`, which has its own tuner."""
    by_value: bool = False
    """Tune shapes in the order of calls x (time now - expected time), up to these limits."""
    until_gain: float | None = None
    gpu_hours: float | None = None
    image: str | None = None
    """Image for every node that has one, in place of the inventory's."""
    rows: Mapping[TableKey, object] | None = None
    """Measure only these rows of a table (gfx, cu_num, key). Other shapes are skipped."""
    share: float = 1.0
    """The share of a shape's candidates to measure."""
    more: Sequence[Path] = ()
    """Further lists, of the same family as `shapes`."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked and planned run. Nothing is on disk before `create`."""

    request: RunRequest
    config: RunConfig
    family: Family
    listed: ShapeList
    plan: Plan
    cost: CostModel
    nodes: list[NodePlan]
    inventory_path: Path
    inventory_text: bytes
    reports: list[NodeReport]
    worths: dict[int, Worth] = field(default_factory=dict)

    def create(self) -> RunPaths:
        """Make the run folder with run.yaml and a ledger that knows all shapes and units. If it cannot be written,
        raise InputError and leave no folder."""
        paths = create_run_folder(self.request.runs, self.config.run)
        try:
            return replace(self, config=replace(self.config, created=time.time()))._fill(paths)
        except (OSError, sqlite3.Error, LedgerError) as e:
            shutil.rmtree(paths.root, ignore_errors=True)
            cause = e.__cause__ if isinstance(e, LedgerError) else e
            if cause is None:
                raise  # the disk is not the cause
            why = cause.strerror if isinstance(cause, OSError) else str(cause)
            raise InputError(
                f"cannot write the run folder {paths.root}: {why}; free some space, or choose another with --runs DIR"
            ) from e

    def _fill(self, paths: RunPaths) -> RunPaths:
        paths.inventory.write_bytes(self.inventory_text)
        save_facts(paths.root, {r.node: r.facts for r in self.reports})
        if self.listed.annotations:
            paths.annotations.write_text(annotations_csv(self.listed, self.family))
        for digest, text in self.request.texts.items():
            paths.texts.mkdir(exist_ok=True)
            (paths.texts / digest).write_bytes(text.encode())
        with Ledger.create(paths.ledger) as ledger, ledger.transaction():
            for key in ("run", "family", "tuner"):
                ledger.set_meta(key, getattr(self.config, key))
            ledger.set_meta("cost", asdict(self.cost))
            factor = recorded_tuner(self.config.tuner).cost_factor(self.config.options)
            ledger.set_meta("units", self.request.share * factor)
            if self.worths:
                ledger.set_meta(WORTHS, {i: astuple(w) for i, w in self.worths.items()})
            ledger.set_meta("created", self.config.created)
            ledger.set_meta("state", "planned")
            ledger.add_shapes(self.listed.shapes, self.family)
            why = f"in {self.request.db} already" if self.request.rows is None else "no row of this chip"
            ledger.skip_shapes(self.plan.skipped, why)
            now = time.time()
            for work in self.plan.work:
                ledger.journal(work, now)
        # written last, because a folder counts as a run once it has run.yaml
        self.config.write(paths.config)
        return paths


def prepare(request: RunRequest) -> Prepared:
    """Check and plan a run. Every fault of the user's input is raised here, before anything is written."""
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
    options |= _counts(listed) if spec.wants_counts else {}
    run = new_run_id(time.time())
    machines = machines_of(inventory)
    asked = [
        n.model_copy(update={"workdir": n.workdir or str(request.runs.absolute())}) if n.is_here else n
        for n in machines.nodes.values()
        if not n.is_here or find_engine(n.engine).runs_images or spec.software
    ]
    if request.ask:
        reports = check_nodes(asked, runs=request.runs, accept_new_host_keys=request.accept_new_host_keys)
        of_pools = check_pools(inventory, run)
    else:
        silent = Finding(UNUSABLE, "gpus", "its GPUs are not known before it is asked", "write their number, `gpus: 8`")
        reports = [NodeReport(n.name, (silent,)) for n in asked if n.gpus == "auto" and not n.is_here]
        of_pools = [NodeReport(name, ()) for name, n in inventory.nodes.items() if n.lease]
    _no_gpu_twice(machines, reports)
    reports = [_with_occupants(r, machines.nodes[r.node], request.busy) for r in reports]
    if spec.software == "aiter" and "root" not in options:
        reports = [r.with_finding(*NO_AITER) if r.facts.values.get("aiter") == "none" else r for r in reports]
    facts = {r.node: r.facts for r in reports}
    nodes = plan_nodes(machines, run, (request.runs / run).absolute(), facts)
    usable = [n for n in nodes if n.slots and n.node not in {r.node for r in reports if not r.usable}]
    reports = [*reports, *of_pools]
    pools = [inventory.nodes[r.node] for r in of_pools if r.usable]
    if not usable and not pools and not request.plan:
        raise NoUsableNodeError("\n".join(["no node can be used:", *(f"  {t}" for r in reports for t in r.problems())]))
    if not request.ask:
        nodes = [*usable, *(plan_unseen(n, run) for n in pools)]
    candidates: list[NodePlan | Node] = [*usable, *pools, *nodes, *inventory.nodes.values()]
    gfx, cu_num = candidates[0].gfx or "", candidates[0].cu_num or 0
    if request.rows is not None:
        rows, chip = request.rows, chip_of_rows(request.rows, *family.chip(gfx, cu_num))
        there, others = ([s for s in listed.shapes if ((*chip, *s.key) in rows) is here] for here in (True, False))
        dropped = Dropped(there, others, [])
    else:
        dropped = drop_tuned(listed.shapes, family, request.db, gfx, cu_num, retune=request.retune)
    tuned = tuned_times(request.db, family, gfx, cu_num) if request.by_value else {}
    worth = _worths(listed, dropped.skipped, tuned, family, (gfx, cu_num or None)) if request.by_value else {}
    cost = CostModel.default(tuner, family, gfx).fit(*gather(request.runs, family, tuner, gfx))
    cost = cost.scaled(request.share * recorded_tuner(tuner).cost_factor(request.options))
    memory = None if pools else device_memory(usable, facts)
    cost = replace(cost, memory=memory or 0)
    plan = make_plan(
        dropped.todo,
        family,
        cost,
        {**{n.node: len(n.slots) for n in usable}, **{n.name: n.count[1] * slots_of(n) for n in pools}},
        tuner=tuner,
        gfx=gfx,
        cu_num=cu_num,
        skipped=dropped.skipped,
        notes=[
            *listed.notes,
            *dropped.notes,
            *risk_notes(family, (s.key for s in dropped.todo), tuner),
            *memory_note(dropped.todo, family, memory),
            *(t for r in reports for t in r.problems()),
            *(pool_note(inventory.nodes[r.node], r) for r in of_pools if r.usable),
            *not_for_aiter(tuner, ((n.node, n.gfx) for n in usable)),
        ],
        values={i: w.value for i, w in worth.items()},
        leases={n.name: n.count[1] for n in pools},
    )
    plan = replace(plan, waits_for=(*_occupied(reports, machines, request.busy), *(queue_of(n.name) for n in pools)))
    config = RunConfig(
        run=run,
        created=time.time(),
        argv=request.argv,
        version=__version__,
        family=family.name,
        tuner=tuner,
        shapes=listed.source,
        shapes_sha256=listed.sha256,
        inventory=str(inventory_path),
        limit=request.limit,
        db=str(request.db.absolute()) if request.db else None,
        retune=request.retune,
        watchdog_s=request.watchdog_s,
        grace_s=request.grace_s,
        err_ratio=spec.err_ratio(family.name) if request.err_ratio is None else request.err_ratio,
        options=options,
        accept_new_host_keys=request.accept_new_host_keys,
        lost_after_s=request.lost_after_s,
        busy=request.busy,
        hold=request.hold,
        until_gain=request.until_gain,
        gpu_hours=request.gpu_hours,
    )
    return Prepared(request, config, family, listed, plan, cost, nodes, inventory_path, inventory_text, reports, worth)


def prepare_each(request: RunRequest, lists: Sequence[Path]) -> list[Prepared]:
    """Check and plan a run for each family of the lists. Raises what `prepare` raises.

    A list's name or columns show its family, else the request does. For a single list the request comes first.
    """
    defaults = load_inventory(request.inventory or data_folder("inventories") / "local.yaml").defaults
    spec = get_tuner(request.tuner or defaults.tuner)
    known = spec.families(request.options) if spec.families else FAMILIES
    first, last = (request.family if len(lists) == 1 else None), request.family or defaults.family
    found: dict[str, list[Path]] = {}
    for path in lists:
        found.setdefault(first or family_of_list(path, known) or last, []).append(path)
    if len(found) > 1 and (request.db is not None or request.gpu_hours is not None):
        raise InputError(f"--db and --gpu-hours are for one family, and these lists are of {', '.join(found)}")
    return [
        prepare(replace(request, family=family, shapes=shapes, more=more)) for family, (shapes, *more) in found.items()
    ]


def prepare_recheck(
    request: RunRequest, profiles: Sequence[Path], runners: int
) -> tuple[Prepared, dict[int, RowToCheck]]:
    """Return the run that measures a table's rows, and the kernels to measure for each shape. Raises InputError."""
    table = request.shapes
    if (table / "run.yaml").is_file():
        of = RunConfig.read(table / "run.yaml")
        options, err = {**of.options, **request.options}, of.err_ratio
        request = replace(
            request, family=request.family or of.family, tuner=request.tuner or of.tuner, options=options, err_ratio=err
        )
    beside = [table.with_name("profile.csv")] if table.name == "tuned.csv" else []
    sources = open_sources([table], profiles or [p for p in beside if p.is_file()], None, request.family)
    rows: dict[TableKey, RowToCheck] = rows_to_check(sources, runners)
    share = sum(len(r.kernels) for r in rows.values()) / max(1, sum(r.known for r in rows.values()))
    request = replace(request, shapes=sources.tables[0], family=sources.family.name, rows=rows, share=share)
    prepared = prepare(request)
    chip = chip_of_rows(rows, *prepared.family.chip(prepared.plan.gfx, prepared.plan.cu_num))
    found = {s.id: rows[key] for s in prepared.listed.shapes if (key := (*chip, *s.key)) in rows}
    if not found:
        has = ", ".join(sorted({chip_name(*key[:2]) for key in rows})[:6])
        raise InputError(
            f"{table}: has no row of {chip_name(*chip)} (it has {has}); if a node cannot tell its chip, set "
            "gfx and cu_num in the inventory"
        )
    return prepared, found


def _counts(listed: ShapeList) -> dict[str, dict[str, float]]:
    """The option `counts`: the numbers in the column `count` by shape, if the file has it. Raises InputError."""
    found = numbers(listed, COUNT)
    return {"counts": {"x".join(map(str, key)): n for key, n in found.items()}} if found else {}


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
    return worths(listed.shapes, calls, {**numbers(listed, NOW), **tuned}, forecast, {s.id for s in skipped})


def _no_gpu_twice(inventory: Inventory, asked: Sequence[NodeReport]) -> None:
    """Raise InventoryError if two slots are the same GPU. This machine is checked too, if it is not the only node."""
    known = {r.node: r.facts for r in asked}
    here = [n for n in inventory.nodes.values() if n.is_here and n.gpus != 0 and n.name not in known]
    reports = check_nodes(here) if len(inventory.nodes) > 1 else ()
    refuse_one_gpu_twice(inventory.nodes, known | {r.node: r.facts for r in reports})


def _occupied(reports: Sequence[NodeReport], machines: Inventory, requested: str | None) -> list[str]:
    """The nodes that the run will wait for, because someone else computes there."""
    nodes = {r.node: machines.nodes[r.node] for r in reports if r.usable and r.node in machines.nodes}
    waiting = [r for r in reports if r.node in nodes and mode_of(nodes[r.node], requested) == "wait"]
    return [r.node for r in waiting if occupants(r.facts, gpus_of(nodes[r.node], r.facts), "")]


def _with_occupants(report: NodeReport, node: Node, request: str | None) -> NodeReport:
    """The report, with a finding on what we do about the node's occupants. With `skip` the node counts as unusable."""
    found = occupants(report.facts, gpus_of(node, report.facts), "") if report.usable else ()
    if not found:
        return report
    mode = what_we_do(mode_of(node, request), found)
    text = busy_sentence("it", mode, occupants_text(found))
    finding = Finding(UNUSABLE if mode == "skip" else WARNING, "busy", text)
    return replace(report, findings=(*(f for f in report.findings if f.about != "busy"), finding))
