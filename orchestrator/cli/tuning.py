"""Driving a run from the command line: plan and notes, foreground, background, retry and cancel."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.cli.printer import Page, plain
from orchestrator.cli.screen import make_view
from orchestrator.command_hints import command
from orchestrator.errors import InputError, NoUsableNodeError, OrchestratorError, RunBusyError
from orchestrator.paths import RunPaths, holder, leave_request
from orchestrator.shapes.model import describe
from orchestrator.view.words import left_words, wait_words
from worker.text import and_more, did_you_mean, plural

if TYPE_CHECKING:
    from orchestrator.cli.options import DriveOptions, RunOptions
    from orchestrator.controller.context import DriveSettings
    from orchestrator.controller.prepared_run import PreparedRun
    from orchestrator.controller.request import RunRequest
    from orchestrator.ledger.reader import LedgerReader
    from orchestrator.planning.plan import Plan

DETACH_S = 20.0
"""Seconds that `--detach` waits until the controller in the background holds the run's lock."""


def run_request(run: RunOptions, drive: DriveOptions, **own: Any) -> RunRequest:
    """Return the request of a command that starts a run; `own`: fields that its common options do not give."""
    from orchestrator.controller.request import RunRequest

    return RunRequest(
        runs=run.runs, limit=run.limit, plan=run.plan, accept_new_host_keys=drive.accept_new_host_keys,
        lost_after_s=drive.lost_after, busy=drive.busy, hold=drive.hold,
        watchdog_s=drive.watchdog, grace_s=drive.grace, argv=sys.argv[1:], **own,
    )  # fmt: skip


def parse_options(pairs: list[str]) -> dict[str, Any]:
    """Return the options of `NAME=VALUE` words, with VALUE read as YAML: 3, true and [1, 2] get their types.

    Raises InputError.
    """
    import yaml

    out: dict[str, Any] = {}
    for pair in pairs:
        name, sep, value = pair.partition("=")
        if not sep or not name:
            raise InputError(f"--tuner-option {pair!r} is not NAME=VALUE")
        try:
            out[name] = yaml.safe_load(value)
        except yaml.YAMLError as e:
            raise InputError(f"--tuner-option {name}: {e}") from e
    return out


def share_of(text: str | None) -> float | None:
    """Return the share of `95%` or `0.95`. Raise InputError."""
    if text is None:
        return None
    try:
        share = float(text.removesuffix("%")) / (100.0 if text.endswith("%") else 1.0)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise InputError(f"{text!r} is not a share such as 95%")
    return share


def show_notes(prepared: PreparedRun, *, quiet: bool) -> None:
    """Print the notes on the input and the defaults, and announce the run. `quiet`: on standard error."""
    lines = [*(f"note: {note}" for note in prepared.plan.notes), headline(prepared.plan), f"run {prepared.config.run}"]
    print(*map(plain, lines), sep="\n", file=sys.stderr if quiet else sys.stdout, flush=True)


def plan_page(prepared: PreparedRun) -> Page:
    """Return a plan, for `--plan`: the work by shared key with its cost, and the slots of each node. Its error says
    that no node can be used."""
    from orchestrator.planning.plan import seconds_of

    plan, family = prepared.plan, prepared.family
    named = _names_by_state(prepared) if prepared.request.db is not None else {}
    shown = {f"{word}_shapes": {"count": len(names), "names": names[:MOST_NAMES]} for word, names in named.items()}
    of_aiter = _aiter_of(prepared) if prepared.config.tuner == "aiter" else {}
    page = Page({**plan.to_json(), **shown, "aiter": of_aiter})
    page.line(*(f"note: {note}" for note in plan.notes))
    page.line(*(f"{word}: {and_more(names, MOST_NAMES)}" for word, names in named.items() if names))
    keys = {s.id: s.key_dict(family) for s in prepared.listed.shapes}
    work = [(w, [keys[i] for unit in w.units for i in unit]) for w in plan.work]
    shared_by_all = set.intersection(*(set(of[0].items()) for _, of in work)) if work else set()
    everywhere = {k: v for k, v in shared_by_all if isinstance(v, str)}
    rows = []
    for w, of in work:
        sizes = [int(key[family.m_column]) for key in of]
        shared = " ".join(f"{k}={v}" for k, v in of[0].items() if k not in (family.m_column, *everywhere))
        span = str(sizes[0]) if len(sizes) == 1 else f"{min(sizes)}..{max(sizes)}"
        cost = f"{seconds_of(w):.1f} s" if plan.known else "not known"
        rows.append((str(len(sizes)), span, shared, cost, "each alone" if w.alone else ""))
    page.table(("shapes", family.m_column, "shared key", "cost", ""), rows, right=("shapes", "cost"))
    if everywhere:
        page.line(f"everywhere: {' '.join(f'{k}={everywhere[k]}' for k in family.key_names if k in everywhere)}")
    page.table(("node", "slots"), ((node, str(n)) for node, n in plan.nodes.items()), "node", right=("slots",))
    page.line(*(f"{node}: {words}" for node, words in of_aiter.items()))
    probed = plural(n, "node was probed", "nodes were probed") if (n := len(prepared.reports)) else "no node was probed"
    page.line(f"cost: {plan.cost_source}", headline(plan), f"{probed}; nothing was started or written (--plan)")
    if not plan.nodes:
        page.error = NoUsableNodeError("no node can be used: see the notes of the plan")
    return page


def _aiter_of(prepared: PreparedRun) -> dict[str, str]:
    """Return a sentence on the AITER of each node of a plan, and the fixes that its files need."""
    from orchestrator.image.fixes import UNKNOWN, aiter_lines

    facts = {r.node: r.facts for r in prepared.reports if r.node in prepared.plan.nodes}
    machines = [plan.source for plan in prepared.nodes if plan.source is not None]
    leased = dict.fromkeys(prepared.plan.leases, f"AITER: {UNKNOWN}")
    return {**aiter_lines(machines, facts), **leased}


MOST_NAMES = 20
"""Most shapes of a plan that are named; the rest are counted."""


def _names_by_state(prepared: PreparedRun) -> dict[str, list[str]]:
    """The shapes that are skipped, because the table has them, and those that are new to it."""
    left_out = set(prepared.plan.skipped)
    skipped = [describe(s.key) for s in prepared.listed.shapes if s.id in left_out]
    new = [describe(s.key) for s in prepared.listed.shapes if s.id not in left_out]
    return {"skipped": skipped, "new": new}


def render_page(prepared: Sequence[PreparedRun], folder: Path) -> Page:
    """Write the node folders of runs, for `--render`, and return where they are; exit code 3 if a node was left out.
    Raises InputError."""
    from orchestrator.controller.deployment import node_files_of, write_files
    from orchestrator.machines.node_files import node_folders

    above = {one.family.name: f"{one.family.name}/" if len(prepared) > 1 else "" for one in prepared}
    plans = {above[one.family.name] + plan.node: (plan, one.config) for one in prepared for plan in one.nodes}
    try:
        files = {node: node_files_of(*planned) for node, planned in plans.items()}
        for node, (plan, _) in plans.items():
            write_files(folder / node, files[node])
            for below in node_folders(plan.slots):  # so that it can be run by hand
                (folder / node / below).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as e:
        raise InputError(f"{e.filename}: cannot be written: {e.strerror}; name another folder with --render") from e
    names = {node: sorted(name for name in of if "/" not in name) for node, of in files.items()}
    notes = list(dict.fromkeys(note for one in prepared for note in one.plan.notes))
    left_out = sorted({r.node for one in prepared for r in one.reports if not r.usable})
    page = Page({"folder": str(folder), "nodes": names, "notes": notes}, 3 if left_out else 0)
    page.line(*(f"note: {note}" for note in notes))
    page.line(*(f"written: {folder / node}: {', '.join(of)}, code/" for node, of in names.items()))
    page.line(*[f"! left out: {', '.join(left_out)} (see the notes)"] * bool(left_out))
    page.line("nothing was started, no node was asked: a run adds the cores near each GPU, and a lease its own GPUs")
    return page


def headline(plan: Plan) -> str:
    """Return `28 shapes, 1 slot on 1 node, about 20 s to 3 min 00 s; a first guess`."""
    skipped = f", {len(plan.skipped)} skipped" if plan.skipped else ""
    what = f"bench of {plan.family}" if plan.tuner == "bench" else f"{plan.family} with tuner {plan.tuner}"
    chip = f"{plan.gfx or 'unknown'} (cu_num {plan.cu_num or 'unknown'})"
    return f"{what} on {chip}: {plural(plan.todo, 'shape')}{skipped}, {_where(plan)}"


def _where(plan: Plan) -> str:
    """Return the slots of a plan, and when its end is expected."""
    if not plan.nodes:
        return "no slot"
    leases = sum(plan.leases.values())
    counts = {"node": len(plan.nodes) - len(plan.leases), "lease": leases}
    places = " and ".join(plural(n, what) for what, n in counts.items() if n)
    return f"{'up to ' if leases else ''}{plural(sum(plan.nodes.values()), 'slot')} on {places}, {_how_long(plan)}"


def _how_long(plan: Plan) -> str:
    """Return when the end of a plan is expected, and what the run waits for before."""
    if not plan.known:
        return f"how long it takes is not known{wait_words(plan.waits_for)}"
    left = left_words(plan.range_s[0], plan.end_s, plan.range_s[1])
    words = left if left.startswith("about") else f"about {left}"
    words += wait_words(plan.waits_for)
    return f"{words}; a first guess" if plan.first_guess else words


def start(prepared: PreparedRun, options: RunOptions) -> Page:
    """Return the plan of a run, or create and drive it, and return its report."""
    if options.plan:
        return plan_page(prepared)
    show_notes(prepared, quiet=options.json_ or options.detach)
    paths = prepared.create()
    return detach(paths) if options.detach else drive_here(paths, json_=options.json_)


def start_each(prepared: Sequence[PreparedRun], options: RunOptions) -> Page:
    """Start the runs of several families one after another, and sum them up. The exit code is the worst.

    After an interrupted run no other is started.
    """
    from orchestrator.cli.ending import EXIT

    if len(prepared) == 1:
        return start(prepared[0], options)
    if options.detach:
        raise InputError("--detach: several families are runs one after another; leave it out")
    pages: list[Page] = []
    errors: list[OrchestratorError] = []
    for one in prepared:
        pages.append(start(one, options))
        if pages[-1].error is not None:  # it is raised behind the summary
            errors.append(pages[-1].error)
            pages[-1].error = None
        if not options.json_:
            pages[-1].print()
        if pages[-1].code == EXIT["interrupted"]:
            break
    runs: list[Any] = [p.document for p in pages]
    code, left = max(*(p.code for p in pages), *(e.exit_code for e in errors), 0), prepared[len(pages) :]
    page = Page({"runs": runs, "not_started": [one.family.name for one in left], "exit_code": code}, code)
    page.error = next((e for e in errors if e.exit_code == code), None)
    for one, run in zip(prepared, () if options.plan else runs, strict=False):
        done, of = run["shapes"]["tuned"], plural(run["shapes"]["total"], "shape")
        page.line(f"{one.family.name}: run {run['run']} {run['state']}: {done} of {of} tuned; next: {run['next'][0]}")
    page.line(*(f"{one.family.name}: not started ({one.listed.source})" for one in left))
    return page


def drive_here(
    paths: RunPaths, *, json_: bool, retry: tuple[int, ...] = (), settings: DriveSettings | None = None
) -> Page:
    """Drive the run in this process, and return the report of its end."""
    from orchestrator.cli.ending import end_page

    state, error = drive_state(paths, json_=json_, retry=retry, settings=settings)
    page = end_page(paths, state)
    page.error = error
    return page


def drive_state(
    paths: RunPaths, *, json_: bool, retry: tuple[int, ...] = (), settings: DriveSettings | None = None
) -> tuple[str, NoUsableNodeError | None]:
    """Drive the run in this process, and return its state at the end, and the reason if it had no usable node."""
    from orchestrator.controller.drive import drive

    with contextlib.closing(make_view(quiet=json_)) as view:
        try:
            return drive(paths, view, retry=retry, settings=settings), None
        except NoUsableNodeError as e:
            return "interrupted", e


def detach(paths: RunPaths) -> Page:
    """Start the controller in a session of its own, with its output in controller.log."""
    log, runs = paths.controller_log, str(paths.root.absolute().parent)
    argv = [sys.executable, "-m", "orchestrator", "resume", paths.run, "--runs", runs]
    with log.open("ab") as out:
        child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    pid, exit_code, drives = child.pid, child.poll(), False
    until = time.monotonic() + DETACH_S
    while exit_code is None and not drives and time.monotonic() < until:
        time.sleep(0.05)
        exit_code = child.poll()
        drives = holder(paths.lock).get("pid") == pid
    if exit_code not in (None, 0, 1):
        tail = log.read_text(errors="replace")[-2000:]
        raise InputError(f"the controller ended at once with code {exit_code}:\n{tail}")
    child.returncode = exit_code or 0  # it outlives this process, which does not wait for it
    page = Page({"run": paths.root.name, "pid": pid, "folder": str(paths.root)})
    page.line(paths.root.name)
    if exit_code is not None:
        page.aside(f"the controller has ended already, with code {exit_code}: {command(f'status {paths.named}')}")
    elif drives:
        page.aside(f"the controller is process {pid}; watch it: {command(f'status {paths.named} --watch')}")
    else:
        page.aside(f"process {pid} was started {DETACH_S:g} s ago, and does not drive the run yet: look into {log}")
    return page


def replace_inventory(paths: RunPaths, inventory: Path | None) -> None:
    """Check an inventory and make it the run's."""
    from orchestrator.inventory.load import load_inventory
    from orchestrator.machines.gpu_names import refuse_one_gpu_twice

    if inventory is not None:
        refuse_one_gpu_twice(load_inventory(inventory).nodes, {})
        aside = paths.inventory.with_suffix(".tmp")
        shutil.copyfile(inventory, aside)
        os.rename(aside, paths.inventory)


def retry(paths: RunPaths, *, reason: str | None, group: str | None, noisy: bool, json_: bool) -> Page:
    """Queue failed shapes or noisy winners again, through the run's controller or by driving the run here."""
    from orchestrator.ledger.reader import LedgerReader

    with LedgerReader.open_readonly(paths.ledger) as ledger:
        _check_retry(paths, ledger, reason, group)
        members = set(ledger.replayed.attempts[group].shapes) if group else None
        found = ledger.noisy() if noisy else [f.id for f in ledger.failed(reason)]
        wanted = [shape for shape in found if members is None or shape in members]
        reasons, counts = list(ledger.failures()), ledger.counts()
    page = Page({"run": paths.run, "queued": len(wanted)})
    if noisy and not wanted:
        page.line("nothing to retry: no winner is noisy")
        return page
    if not wanted:
        which = "".join(f" with {w}" for w in (reason and f"reason {reason!r}", group and f"group {group!r}") if w)
        there = f"failed shapes have: {', '.join(reasons)}" if reasons else "no shape failed"
        page.line(f"nothing to retry: no failed shape{which} ({there})")
        if counts.pending and not holder(paths.lock):
            page.line(f"{plural(counts.pending, 'shape')} pending; go on with: {command(f'resume {paths.named}')}")
        return page
    what = plural(len(wanted), "noisy winner" if noisy else "failed shape")
    if holder(paths.lock):
        with contextlib.suppress(RunBusyError):
            leave_request(paths.requests, "retry", shapes=wanted)
        watch = command(f"status {paths.named} --watch")
        page.line(f"{what} queued again; watch: {watch}")
        return page
    print(f"trying {what} again", file=sys.stderr if json_ else sys.stdout)
    return drive_here(paths, json_=json_, retry=tuple(wanted))


def _check_retry(paths: RunPaths, ledger: LedgerReader, reason: str | None, group: str | None) -> None:
    """Raise InputError where no shape can fail for the reason, or the run has no such group."""
    from orchestrator.reasons import Reason

    legal = [r.value for r in Reason if r.fails_shapes]
    if reason is not None and reason not in legal:
        near = did_you_mean(reason, legal)
        raise InputError(
            f"--reason {reason!r} is not a reason for which a shape fails{near} (there are: {', '.join(legal)})"
        )
    groups = list(ledger.replayed.attempts)
    if group is not None and group not in groups:
        near = did_you_mean(group, groups)
        listing = command(f"explain {paths.named}")
        raise InputError(f"run {paths.run} has no group {group!r}{near} ({listing} lists them)")


def cancel(paths: RunPaths, settings: DriveSettings | None = None) -> None:
    """Stop the run, through its controller or, without one, on the nodes directly. A finished run stays finished; only
    workers that run again on its nodes, such as containers that came back, are stopped. Raises InputError."""
    from orchestrator.controller.drive import drive

    controller, page = holder(paths.lock), Page()
    state, nodes = _farewell(paths)
    if not controller and state == "finished" and nodes is not None and not any(s["left"] for s in nodes.values()):
        _add_cancelled(page, paths, state, _looked_at_again(paths, nodes, settings))
        page.print()
        return
    if controller:
        leave_request(paths.requests, "cancel")
        until = time.monotonic() + 60.0
        while holder(paths.lock):
            if time.monotonic() > until:
                raise InputError(
                    f"the controller (process {controller.get('pid')}) did not end within 60 s; end it, then:"
                    f" {command(f'cancel {paths.named}')}"
                )
            time.sleep(0.1)
    else:
        drive(paths, make_view(quiet=True), cancel=True, settings=settings)
        page.line(f"run {paths.root.name}: no controller was driving it")
    _add_cancelled(page, paths, *_farewell(paths))
    page.print()


def _looked_at_again(
    paths: RunPaths, nodes: dict[str, dict[str, Any]], settings: DriveSettings | None
) -> dict[str, dict[str, Any]]:
    """Return what the last controller of a finished run found on each node (`nodes`), brought up to date by a look at
    the machines. Leases are given back with the run, and nobody looks at a node again that had no worker."""
    from orchestrator.controller.runs import stop_left_workers

    seen = {node: was if was["ran"] is None else was | {"ran": 0} for node, was in nodes.items()}
    for node, stopped in stop_left_workers(paths, settings.reach if settings else None).items():
        if stopped.ran or seen.get(node, {}).get("ran") is not None:
            seen[node] = asdict(stopped)
    return seen


def _farewell(paths: RunPaths) -> tuple[str, dict[str, dict[str, Any]] | None]:
    """Return the run's state, and what its last controller found on each node; None if it ended without a look."""
    from orchestrator.ledger.reader import LedgerReader

    with LedgerReader.open_readonly(paths.ledger) as ledger:
        seen = ledger.meta("farewell", {})
        return ledger.state, seen.get("nodes") if seen.get("epoch") == ledger.meta("epoch", 0) else None


def _add_cancelled(page: Page, paths: RunPaths, state: str, nodes: dict[str, dict[str, Any]] | None) -> None:
    """Add how the run ended, and what was found on each node; None: its last controller did not look."""
    page.line(f"run {paths.root.name} is {state}")
    if nodes is None:
        page.line(f"its last controller ended without checking the nodes: {command(f'cancel {paths.named}')}")
        return
    well = {n: s["ran"] for n, s in sorted(nodes.items()) if not s["left"]}
    for words, there in (
        (f"stopped {plural(sum(n or 0 for n in well.values()), 'worker')} on", [n for n, ran in well.items() if ran]),
        ("no worker ran on", [n for n, ran in well.items() if ran == 0]),
        ("nothing was started on", sorted(n for n, s in nodes.items() if s["ran"] is None)),
    ):
        page.line(*[f"{words} {', '.join(there)}"] * bool(there))
    for node in sorted(nodes.keys() - well.keys()):
        left = nodes[node]["left"]
        page.line(f"! {node}: workers may be left; they end after 15 minutes without work: {left}")
