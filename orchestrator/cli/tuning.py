"""Driving a run from the command line: plan and notes, foreground, background, retry and cancel."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.cli.output.status import View, make_view
from orchestrator.command_hints import command
from orchestrator.errors import InputError, NoUsableNodeError, RunBusyError
from orchestrator.paths import RunConfig, RunPaths
from worker.text import plural

if TYPE_CHECKING:
    from orchestrator.cli.options import DriveOptions, RunOptions
    from orchestrator.ledger import LedgerReader
    from orchestrator.planning import Plan
    from orchestrator.run.drive import DriveSettings
    from orchestrator.run.prepare import Prepared, RunRequest


def run_request(run: RunOptions, drive: DriveOptions, **own: Any) -> RunRequest:
    """Return the request of a command that starts a run; `own`: fields that its common options do not give."""
    from orchestrator.run.prepare import RunRequest

    return RunRequest(
        runs=run.runs, limit=run.limit, accept_new_host_keys=drive.accept_new_host_keys,
        lost_after_s=drive.lost_after, busy=drive.busy.value if drive.busy else None, hold=drive.hold,
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
        raise InputError(f"{text!r} is no share such as 95%")
    return share


def show_notes(prepared: Prepared, *, quiet: bool) -> None:
    """Print what was cleaned, which defaults apply, and the run to come."""
    stream = sys.stderr if quiet else sys.stdout
    for note in prepared.plan.notes:
        print(f"note: {note}", file=stream)
    plan = prepared.plan
    print(headline(plan), file=stream)
    print(f"run {prepared.config.run}", file=stream, flush=True)


def show_plan(prepared: Prepared, *, json_: bool) -> None:
    """Print a plan, for `--plan`."""
    if json_:
        print(json.dumps(prepared.plan.to_json(), indent=1))
        return
    from orchestrator.cli.output.terminal import plan_table

    for note in prepared.plan.notes:
        print(f"note: {note}")
    plan_table(prepared.plan, prepared.family, prepared.listed.shapes)
    print(headline(prepared.plan))
    n = len(prepared.reports)
    probed = plural(n, "node was probed", "nodes were probed") if n else "no node was probed"
    print(f"{probed}; nothing was started or written (--plan)")


def headline(plan: Plan) -> str:
    """Return `28 shapes, 1 slot on 1 node, about 20 s to 3 min 00 s; a first guess`."""
    slots = sum(plan.nodes.values())
    skipped = f", {len(plan.skipped)} skipped" if plan.skipped else ""
    what = f"bench of {plan.family}" if plan.tuner == "bench" else f"{plan.family} with tuner {plan.tuner}"
    return (
        f"{what} on {plan.gfx or 'unknown'} (cu_num {plan.cu_num or 'unknown'}): "
        f"{plural(plan.todo, 'shape')}{skipped}, "
        f"{plural(slots, 'slot')} on {plural(len(plan.nodes), 'node')}, {estimate(plan)}"
    )


def estimate(plan: Plan) -> str:
    """Return `about 2 min 05 s`, or with little known `about 20 s to 3 min 00 s; a first guess`."""
    from orchestrator.view.words import left_words

    words = left_words(plan.range_s[0], plan.end_s, plan.range_s[1])
    words = words if words.startswith("about") else f"about {words}"
    return f"{words}; a first guess" if plan.first_guess else words


class _Quiet:
    """View for --json: notes on standard error, nothing else."""

    def update(self, status: object) -> None:
        """Nothing to show."""

    def note(self, text: str, *, bad: bool = False) -> None:
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing to close."""


def start(prepared: Prepared, options: RunOptions) -> int:
    """Print the plan of a run, or create and drive it, and return the exit code."""
    if options.plan:
        show_plan(prepared, json_=options.json_)
        return 0
    show_notes(prepared, quiet=options.json_ or options.detach)
    return drive_or_detach(prepared.create(), detached=options.detach, json_=options.json_)


def drive_or_detach(paths: RunPaths, *, detached: bool, json_: bool) -> int:
    """Drive the run here, or leave it to a controller in the background, and return the exit code."""
    if detached:
        detach(paths, json_=json_)
        return 0
    return drive_here(paths, json_=json_)


def drive_here(
    paths: RunPaths,
    *,
    json_: bool,
    retry: tuple[int, ...] = (),
    report: bool = True,
    settings: DriveSettings | None = None,
) -> int:
    """Drive the run in this process, print the report at its end, and return the exit code (without a report, of its
    state alone)."""
    from orchestrator.cli.output.run_end import EXIT, report_end
    from orchestrator.run.drive import drive

    view: View = _Quiet() if json_ else make_view()
    unusable: NoUsableNodeError | None = None
    state = "interrupted"
    try:
        with contextlib.closing(view):
            state = drive(paths, view, retry=retry, settings=settings).state
    except NoUsableNodeError as e:
        unusable = e
    code = report_end(paths, state, json_=json_) if report else EXIT[state]
    if unusable is not None:
        raise unusable
    return code


def detach(paths: RunPaths, *, json_: bool) -> None:
    """Start the controller in a session of its own, with its output in controller.log."""
    from orchestrator.dispatch.control import holder

    log = paths.controller_log
    runs = str(paths.root.absolute().parent)
    argv = [sys.executable, "-m", "orchestrator", "resume", paths.run, "--runs", runs]
    with log.open("ab") as out:
        child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    until = time.monotonic() + 20.0
    while time.monotonic() < until and not holder(paths.lock):
        if child.poll() is not None:
            tail = log.read_text(errors="replace")[-2000:]
            if child.returncode not in (0, 1):
                raise InputError(f"the controller ended at once with code {child.returncode}:\n{tail}")
            break
        time.sleep(0.05)
    child.returncode = child.returncode or 0  # it outlives this process, which does not wait for it
    if json_:
        print(json.dumps({"run": paths.root.name, "pid": child.pid, "folder": str(paths.root)}))
    else:
        print(paths.root.name)
        print(
            f"the controller is process {child.pid}; watch it: {command(f'status {paths.named} --watch')}",
            file=sys.stderr,
        )


def replace_inventory(paths: RunPaths, inventory: Path | None) -> None:
    """Check an inventory and make it the run's."""
    from orchestrator.inventory import load_inventory
    from orchestrator.nodes.occupancy import refuse_one_gpu_twice

    if inventory is not None:
        refuse_one_gpu_twice(load_inventory(inventory).nodes, {})
        aside = paths.inventory.with_suffix(".tmp")
        shutil.copyfile(inventory, aside)
        os.rename(aside, paths.inventory)


def replace_config(paths: RunPaths, **changes: Any) -> None:
    """Set options of a run that are not None; the modification time of run.yaml, which is the run's age, stays."""
    changes = {name: value for name, value in changes.items() if value is not None}
    if not changes:
        return
    config = RunConfig.read(paths.config)
    stat = paths.config.stat()
    aside = paths.config.with_suffix(".tmp")
    replace(config, **changes).write(aside)
    os.utime(aside, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    os.rename(aside, paths.config)


def retry(paths: RunPaths, *, reason: str | None, group: str | None, json_: bool) -> int:
    """Queue failed shapes again, through the run's controller or by driving the run here; return the exit code."""
    from orchestrator.dispatch import control
    from orchestrator.dispatch.control import holder
    from orchestrator.ledger import LedgerReader

    with LedgerReader.open_readonly(paths.ledger) as ledger:
        _check_retry(paths, ledger, reason, group)
        members = set(ledger.replayed.attempts[group].shapes) if group else None
        failed = [f for f in ledger.failed(reason) if members is None or f.id in members]
        reasons = list(ledger.failures())
    if not failed:
        which = " ".join(f"with {w}" for w in (reason and f"reason {reason!r}", group and f"group {group!r}") if w)
        there = f" (failed shapes have: {', '.join(reasons)})" if reasons else " (no shape failed)"
        print(f"nothing to retry: no failed shape {which}{there}".replace("  ", " "))
        return 0
    ids = tuple(f.id for f in failed)
    if holder(paths.lock):
        with contextlib.suppress(RunBusyError):
            control.ask(paths.requests, "retry", shapes=list(ids))
        print(f"{plural(len(ids), 'failed shape')} queued again; watch: {command(f'status {paths.named} --watch')}")
        return 0
    if not json_:
        print(f"trying {plural(len(ids), 'failed shape')} again")
    return drive_here(paths, json_=json_, retry=ids)


def _check_retry(paths: RunPaths, ledger: LedgerReader, reason: str | None, group: str | None) -> None:
    """Raise InputError where no shape can fail for the reason, or the run has no such group."""
    from orchestrator.reasons import Reason
    from orchestrator.tables.faults import did_you_mean

    legal = [r.value for r in Reason if r.fails_shapes]
    if reason is not None and reason not in legal:
        near = did_you_mean(reason, legal)
        raise InputError(
            f"--reason {reason!r} is not a reason for which a shape fails{near} (there are: {', '.join(legal)})"
        )
    groups = list(ledger.replayed.attempts)
    if group is not None and group not in groups:
        near = did_you_mean(group, groups)
        raise InputError(f"run {paths.run} has no group {group!r}{near} ({command(f'explain {paths.run}')} lists them)")


def cancel(paths: RunPaths, settings: DriveSettings | None = None) -> None:
    """Stop the run, through its controller or, without one, on the nodes directly. Raises InputError."""
    from orchestrator.dispatch import control
    from orchestrator.dispatch.control import holder
    from orchestrator.run.drive import drive

    controller = holder(paths.lock)
    if not controller:
        drive(paths, _Quiet(), cancel=True, settings=settings)
        print(f"run {paths.root.name}: no controller was driving it")
        _print_cancelled(paths)
        return
    control.ask(paths.requests, "cancel")
    until = time.monotonic() + 60.0
    while time.monotonic() < until:
        if not holder(paths.lock):
            _print_cancelled(paths)
            return
        time.sleep(0.1)
    raise InputError(
        f"the controller (process {controller.get('pid')}) did not end within 60 s; end it and run cancel again"
    )


def _print_cancelled(paths: RunPaths) -> None:
    """Print how the run ended, and what its last controller found on each node."""
    from orchestrator.ledger import LedgerReader

    with LedgerReader.open_readonly(paths.ledger) as ledger:
        seen, epoch, state = ledger.meta("farewell", {}), ledger.meta("epoch", 0), ledger.state
    print(f"run {paths.root.name} is {state}")
    if seen.get("epoch") != epoch:
        print("its last controller ended without checking the nodes: run cancel again")
        return
    nodes: dict[str, dict[str, Any]] = seen["nodes"]
    stopped = {n: s["ran"] for n, s in nodes.items() if s["ran"] and not s["left"]}
    for words, there in (
        ("stopped " + plural(sum(stopped.values()), "worker") + " on", list(stopped)),
        ("no worker ran on", [n for n, s in nodes.items() if s["ran"] == 0 and not s["left"]]),
        ("nothing was started on", [n for n, s in nodes.items() if s["ran"] is None]),
    ):
        if there:
            print(f"{words} {', '.join(sorted(there))}")
    for node in sorted(n for n, s in nodes.items() if s["left"]):
        left = nodes[node]["left"]
        print(f"! {node}: workers may be left; they end after 15 minutes without work: {left}")
