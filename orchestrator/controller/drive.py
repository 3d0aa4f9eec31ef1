"""Drives a run from its folder to its end. The same code starts, resumes and retries."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any, cast

from orchestrator.command_hints import command
from orchestrator.controller.leases import LeasedNodes
from orchestrator.controller.loop import Controller
from orchestrator.controller.messages import Message, NodeProgress, Timeouts, Watcher
from orchestrator.controller.node import NodeDriver
from orchestrator.controller.pools import machines_of, node_maker, pools_of
from orchestrator.errors import NoUsableNodeError, TakenOverError
from orchestrator.events import RetryAsked
from orchestrator.families import get_family, get_tuner
from orchestrator.inventory.load import limit, load_inventory, resolved
from orchestrator.inventory.model import Inventory
from orchestrator.inventory.values import masker
from orchestrator.ledger.database import checkpoints
from orchestrator.ledger.ingest import Ingest
from orchestrator.ledger.reader import NOT_WORTH_IT, LedgerReader, reconcile
from orchestrator.ledger.writer import Ledger
from orchestrator.machines.admission import NodeAdmission
from orchestrator.machines.check_script import script
from orchestrator.machines.facts import load_facts, save_facts
from orchestrator.machines.gpu_names import refuse_one_gpu_twice
from orchestrator.machines.node_check import check_nodes
from orchestrator.machines.node_files import node_files, node_folders, worker_code
from orchestrator.machines.node_link import engine_of, private_env, results_folder, transport_of
from orchestrator.machines.node_plan import NodePlan, node_of, plan_nodes, with_device_locks
from orchestrator.machines.occupancy import gpus_of, mode_of
from orchestrator.paths import RunConfig, RunPaths, run_lock
from orchestrator.planning.roofline import Won, Worth, won
from orchestrator.policy import Policy, PolicySettings
from orchestrator.results.export import export, provenance
from orchestrator.results.recheck import kernels_to_check
from orchestrator.transport.base import RemoteFile, Transport
from orchestrator.view.live import LiveStatus
from orchestrator.view.status import RunHeader
from worker.tuners.catalog import recorded_tuner

WORTHS = "worths"
"""Key of the ledger's meta data: the worth of each shape, by id, in a run with --by-value."""


def worths_of(ledger: LedgerReader) -> dict[int, Worth]:
    """The worth of each shape in a run with --by-value; {} for any other run."""
    return {int(i): Worth(*w) for i, w in ledger.meta(WORTHS, {}).items()}


def won_so_far(ledger: LedgerReader, of: Mapping[int, Worth]) -> Won:
    """The gain of the run so far."""
    return won(of, {w.shape: w.us for w in ledger.winners()}, [s.id for s in ledger.failed()])


_US = "SELECT us FROM rows WHERE attempt=? AND shape=? AND winner=1 ORDER BY id LIMIT 1"


class Limits:
    """The limits of a run. `reached` names the limit that is reached, "" before."""

    def __init__(self, ledger: LedgerReader, config: RunConfig) -> None:
        self._ledger, self._state = ledger, ledger.replayed
        self._until, self._hours = config.until_gain, config.gpu_hours
        self._worths = worths_of(ledger)
        self._us: dict[int, float] = {}
        """The time of each winner. Each is read once, when it arrives."""
        self._seen = (-1, -1)
        self._share = 0.0

    def reached(self) -> str:
        """Read the new results, and name the limit that they reach."""
        state = self._state
        if self._hours is not None:
            now, begun = time.time(), [a for a in state.attempts.values() if a.started_at is not None]
            used = sum((now if a.ended_at is None else a.ended_at) - (a.started_at or now) for a in begun) / 3600.0
            if used >= self._hours:
                return f"{used:.3g} of {self._hours:g} GPU hours are used (--gpu-hours)"
        if self._until is not None and self._worths:
            if (state.tuned, state.failed) != self._seen:
                self._seen = (state.tuned, state.failed)
                for s in state.shapes.values():
                    if s.state == "tuned" and s.id not in self._us:
                        self._us[s.id] = self._ledger.query(_US, (s.attempt, s.id))[0][0]
                failed = [s.id for s in state.shapes.values() if s.state == "failed"]
                self._share = won(self._worths, self._us, failed).share
            if self._share >= self._until:
                return f"{self._share:.1%} of the expected gain is won (--until-gain {self._until:.4g})"
        return ""


IDLE_EXIT_S = 900.0
"""A worker exits after this many seconds without work and without a controller."""


@dataclass(frozen=True, slots=True)
class DriveSettings:
    """Settings of a controller that users cannot change."""

    reach: Callable[[NodePlan], Transport] | None = None
    """Makes the transport of a planned node. None: use the one in its inventory."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    policy: PolicySettings = field(default_factory=PolicySettings)


def drive(
    paths: RunPaths,
    watcher: Watcher,
    *,
    retry: Sequence[int] = (),
    cancel: bool = False,
    handle_signals: bool = True,
    settings: DriveSettings | None = None,
) -> str:
    """Drive the run until it is finished, interrupted or cancelled, and return which.

    `retry`: failed shapes to queue again first. `cancel`: only stop the workers and read their last records.

    Raises RunBusyError, TakenOverError, NoUsableNodeError, LedgerError, and InputError for the run's own files.
    """
    config = RunConfig.read(paths.config)
    with run_lock(paths), Ledger.open(paths.ledger) as ledger, checkpoints(paths.ledger):
        warn_without_wal(ledger, watcher)
        if not cancel and not retry and not _goes_on(ledger, config, watcher):
            return "finished"
        interrupts: list[int] = []
        caught = (signal.SIGINT, signal.SIGTERM) if handle_signals else ()
        previous = {number: signal.signal(number, lambda *_: interrupts.append(1)) for number in caught}
        state, limited = "interrupted", ""
        try:
            controller = _controller(
                paths, config, ledger, watcher, interrupts, settings or DriveSettings(), cancel=cancel, more=bool(retry)
            )
            state = controller.run([RetryAsked(tuple(retry))] if retry else [])
            limited = controller.limited
        except TakenOverError:
            state = ""  # another controller has the run now
            raise
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            if state:
                with ledger.transaction():
                    if state == "finished" and limited:
                        left = [s.id for s in ledger.shapes("pending")]
                        ledger.skip_shapes(left, limited, time.time(), reason=NOT_WORTH_IT)
                    ledger.set_meta("state", state)
                    ledger.set_meta("ended", time.time())
                inventory = hashlib.sha256(paths.inventory.read_bytes()).hexdigest()
                code, _ = worker_code(recorded_tuner(config.tuner).worker_package)
                export(ledger, paths, provenance(ledger, config, inventory_sha256=inventory, code_sha=code))
                report_faults(ledger, watcher)
    return state


def _goes_on(ledger: Ledger, config: RunConfig, watcher: Watcher) -> bool:
    """Return False if the run is finished: then nothing changes on its nodes. If it ended at a limit that was raised
    since, queue the shapes that the limit left out."""
    if ledger.state != "finished":
        return True
    if config.until_gain is not None or config.gpu_hours is not None:
        if why := Limits(ledger, config).reached():
            watcher.note(f"{why}: raise --until-gain or --gpu-hours to go on")
            return False
        with ledger.transaction():
            ledger.reopen_skipped()
    if ledger.replayed.pending:
        return True
    watcher.note("every shape of this run is settled: nothing was started")
    return False


def warn_without_wal(ledger: LedgerReader, watcher: Watcher) -> None:
    """Tell the watcher if SQLite has no write-ahead log on the file system of the run, as on some network disks."""
    mode = ledger.query("PRAGMA journal_mode")[0][0]
    if mode != "wal":
        watcher.note(
            f"{ledger.path}: SQLite's write-ahead log does not work on this file system (journal mode {mode}), so"
            " `status` and the page may delay the run; keep runs on a local disk: --runs DIR",
            bad=True,
        )


def report_faults(ledger: LedgerReader, watcher: Watcher) -> None:
    """Report everything in the ledger that does not add up. That is always a fault of this program, not of the user."""
    for fault in reconcile(ledger):
        watcher.note(f"the ledger does not add up: {fault}", bad=True)


def _controller(
    paths: RunPaths,
    config: RunConfig,
    ledger: Ledger,
    watcher: Watcher,
    interrupts: list[int],
    settings: DriveSettings,
    *,
    cancel: bool,
    more: bool,
) -> Controller:
    """`more`: there will be work, although every shape may be settled now."""
    family = get_family(config.family)
    epoch = int(ledger.meta("epoch", 0)) + 1
    with ledger.transaction():
        ledger.set_meta("epoch", epoch)
        ledger.set_meta("state", "running")
        ledger.set_meta("controller", f"{os.getpid()} on {socket.gethostname()}")
    policy = Policy(settings.policy)
    ledger.drive(policy.state)
    launch = not cancel and (more or policy.state.pending > 0)
    inventory = limit(load_inventory(paths.inventory), config.limit)
    machines = machines_of(inventory)
    plans = planned(paths, config, machines) if machines.nodes else []
    about = RunHeader.of(ledger, config, {p.node: p.slots for p in plans})

    def driver(plan: NodePlan, transport: Transport | None = None) -> NodeDriver:
        offsets = {k: v for k, v in ledger.offsets(plan.node).items() if k[0] in ("E", "L")}  # not of our log
        return _driver(paths, config, plan, epoch, controller.post, settings, offsets, transport, launch=launch)

    def newcomers(there: Collection[str]) -> list[NodeDriver]:
        edited = limit(load_inventory(paths.inventory), config.limit)
        return [driver(p) for p in planned(paths, config, machines_of(edited)) if p.node not in there]

    pools = pools_of(inventory, config.run)
    leased = [n for n in policy.state.nodes.values() if n.lease]

    supply = LeasedNodes(
        pools,
        node_maker(inventory, {p.name: p.source for p in pools}, config.run, driver),
        known=leased,
        other_slots=lambda: sum(len(p.slots) for p in plans),
        hold=config.hold,
        grow=not cancel,
        wake=lambda: controller.wake(),
    )

    controller = Controller(
        ledger,
        policy,
        Ingest(ledger, policy.state),
        LiveStatus(policy.state, about),
        config,
        keys=lambda i: dict(zip(family.key_names, ledger.keys[i], strict=True)),
        kernels=kernels_to_check(paths.recheck),
        logs=paths.logs,
        requests_folder=paths.requests,
        watcher=watcher,
        mask=masker([n.options() for n in inventory.nodes.values()]),
        epoch=epoch,
        timeouts=replace(settings.timeouts, grace=config.grace_s, lost=config.lost_after_s),
        interrupts=interrupts,
        cancel=cancel,
        known=policy.state.nodes.keys() - {n.name for n in leased},
        newcomers=newcomers,
        leases=supply,
        limit=Limits(ledger, config).reached,
    )
    for plan in plans:
        controller.add(driver(plan))
    return controller


def planned(paths: RunPaths, config: RunConfig, inventory: Inventory) -> list[NodePlan]:
    """The plans of the nodes to drive. A node without a known slot is checked again. Raise NoUsableNodeError if no node
    has a slot."""
    plans = plan_nodes(inventory, config.run, paths.root)
    unknown = [inventory.nodes[p.node] for p in plans if not p.slots]
    if unknown:
        reports = check_nodes(unknown, accept_new_host_keys=config.accept_new_host_keys)
        save_facts(paths.root, {r.node: r.facts for r in reports})
        plans = plan_nodes(inventory, config.run, paths.root)
    refuse_one_gpu_twice(inventory.nodes, load_facts(paths.root, inventory.nodes))
    if not any(p.slots for p in plans):
        check = command(f"nodes check -i {quote(str(paths.inventory))}")
        raise NoUsableNodeError(f"no node has a slot that we know of; see: {check}")
    return [p for p in plans if p.slots]


def node_files_of(plan: NodePlan, config: RunConfig, texts: Path | None = None) -> dict[str, RemoteFile]:
    """The files of a planned node. The inventory's references stay unresolved."""
    node = node_of(plan)
    if node.lease is None:  # a scheduler lends each GPU to one run alone
        plan = with_device_locks(plan, shared=mode_of(node, config.busy) == "share")
    tuner = get_tuner(config.tuner, for_tune=False)
    options = {**config.options, "family": config.family} if tuner.wants_family else config.options
    return node_files(plan, config.run, tuner.name, options, IDLE_EXIT_S, texts)


def write_files(folder: Path, files: Mapping[str, RemoteFile]) -> None:
    """Write files of a planned node into a folder here. Raises OSError."""
    for name, file in files.items():
        path = folder / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_bytes(file.data)
        path.chmod(file.mode)


def _driver(
    paths: RunPaths,
    config: RunConfig,
    plan: NodePlan,
    epoch: int,
    post: Callable[[Message], None],
    settings: DriveSettings,
    offsets: Mapping[tuple[str, str], int],
    transport: Transport | None,
    *,
    launch: bool,
) -> NodeDriver:
    """The driver of a planned node. `transport`: a connected one, for a leased node; None: as the inventory says."""
    leased, node = transport is not None, node_of(plan)
    files = node_files_of(plan, config, paths.texts)
    write_files(paths.node(plan.node), {name: file for name, file in files.items() if not name.startswith("code/")})
    if transport is None:
        reach = settings.reach or partial(transport_of, accept_new_host_keys=config.accept_new_host_keys)
        transport = reach(plan)
    post = _masked(masker(node.options()), post)
    engine = engine_of(plan, transport, progress=lambda text: post(NodeProgress(plan.node, text)))
    admission = NodeAdmission(
        transport,
        engine,
        mode_of(node, config.busy),
        script(resolved(node), brief=True),
        lambda facts: gpus_of(node, facts),
        config.run,
        first_s=settings.timeouts.busy,
        locks=not leased,
    )
    return NodeDriver(
        transport,
        engine,
        plan.folder,
        files,
        node_folders(plan.slots),
        plan.slots,
        private_env(plan),
        epoch,
        offsets,
        post,
        launch=launch,
        admission=admission,
        results=results_folder(plan),
        home=paths.attempts if recorded_tuner(config.tuner).keeps_reproductions else None,
        connected=leased,
        timeouts=settings.timeouts,
    )


def _masked(mask: Callable[[str], str], post: Callable[[Message], None]) -> Callable[[Message], None]:
    """Mask messages before they go into the ledger: it holds references (`${env:NAME}`) and not their values."""

    def post_masked(message: Message) -> None:
        detail = getattr(message, "detail", "")
        post(replace(cast(Any, message), detail=mask(detail)) if detail else message)

    return post_masked
