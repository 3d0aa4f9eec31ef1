"""What tune, resume, retry and cancel do and print."""

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

from orchestrator.cli.view import View, make_view
from orchestrator.errors import InputError, NoUsableNodeError, RunBusyError
from orchestrator.runs import RunConfig
from orchestrator.status import duration

if TYPE_CHECKING:
    from orchestrator.paths import RunPaths
    from orchestrator.planning import Plan
    from orchestrator.prepare import Prepared


def parse_options(pairs: list[str]) -> dict[str, Any]:
    """`NAME=VALUE` with VALUE read as YAML (so that 3, true and [1, 2] are what they look like)."""
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


def show_notes(prepared: Prepared, *, quiet: bool) -> None:
    """What was cleaned, which defaults were taken, what is about to happen."""
    stream = sys.stderr if quiet else sys.stdout
    for note in prepared.plan.notes:
        print(f"note: {note}", file=stream)
    plan = prepared.plan
    print(headline(plan), file=stream)
    print(f"run {prepared.config.run}", file=stream, flush=True)


def show_plan(prepared: Prepared, *, json_: bool) -> None:
    """`tune --plan`."""
    if json_:
        print(json.dumps(prepared.plan.to_json(), indent=1))
        return
    from orchestrator.cli.tables import plan_table

    for note in prepared.plan.notes:
        print(f"note: {note}")
    plan_table(prepared.plan, prepared.family, prepared.listed.shapes)
    print(headline(prepared.plan))
    print("nothing was started or written (--plan)")


def headline(plan: Plan) -> str:
    """`28 shapes in 9 groups (0 skipped) on 1 slot of 1 node: about 2 min`."""
    slots = sum(n.slots for n in plan.nodes)
    skipped = f", {len(plan.skipped)} skipped" if plan.skipped else ""
    return (
        f"{plan.family} with tuner {plan.tuner} on {plan.gfx or 'unknown'} (cu_num {plan.cu_num or 'unknown'}): "
        f"{_count(plan.todo, 'shape')} in {_count(len(plan.groups), 'group')}{skipped}, "
        f"{_count(slots, 'slot')} on {_count(len(plan.nodes), 'node')}, about {duration(plan.end_s)}"
    )


def _count(n: int, word: str) -> str:
    return f"{n} {word}" if n == 1 else f"{n} {word}s"


class _Quiet:
    """For --json: notes go to standard error, the picture nowhere."""

    def update(self, status: object) -> None:
        """Nothing to show."""

    def note(self, text: str, *, bad: bool = False) -> None:
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Nothing to close."""


def go(paths: RunPaths, *, json_: bool, retry: tuple[int, ...] = ()) -> int:
    """Drive the run in this process, then say how it ended. Returns the exit code."""
    from orchestrator.cli.ending import ending
    from orchestrator.drive import drive

    view: View = _Quiet() if json_ else make_view()
    hopeless: NoUsableNodeError | None = None
    state = "interrupted"
    try:
        with contextlib.closing(view):
            state = drive(paths, view, retry=retry).state
    except NoUsableNodeError as e:
        hopeless = e
    code = ending(paths, state, json_=json_)
    if hopeless is not None:
        raise hopeless
    return code


def detach(paths: RunPaths, *, json_: bool) -> None:
    """Start the controller in a session of its own; it writes what it says to controller.log."""
    from orchestrator.cli.ending import shown
    from orchestrator.dispatch.lock import holder

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
    child.returncode = child.returncode or 0  # it is not ours to wait for
    if json_:
        print(json.dumps({"run": paths.root.name, "pid": child.pid, "folder": str(paths.root)}))
    else:
        print(paths.root.name)
        print(
            f"the controller runs on as process {child.pid}; watch it: gemmfleet status {shown(paths)} --watch",
            file=sys.stderr,
        )


def replace_inventory(paths: RunPaths, inventory: Path | None) -> None:
    """Take a checked inventory into the run folder."""
    from orchestrator.inventory import load_inventory

    if inventory is not None:
        load_inventory(inventory)
        aside = paths.inventory.with_suffix(".tmp")
        shutil.copyfile(inventory, aside)
        os.rename(aside, paths.inventory)


def replace_busy(paths: RunPaths, busy: str) -> None:
    """What is done about busy nodes from now on; the age of the run, which is run.yaml's, stays."""
    config = RunConfig.read(paths.config)
    stat = paths.config.stat()
    aside = paths.config.with_suffix(".tmp")
    replace(config, busy=busy).write(aside)
    os.utime(aside, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    os.rename(aside, paths.config)


def retry(paths: RunPaths, *, reason: str | None, group: str | None, json_: bool) -> int:
    """Queue failed shapes again: in the living controller's hands, or by driving the run here."""
    from orchestrator.cli.ending import shown
    from orchestrator.dispatch import requests
    from orchestrator.dispatch.lock import holder
    from orchestrator.ledger import LedgerReader

    with LedgerReader.open_readonly(paths.ledger) as ledger:
        members = set(ledger.group_shapes(group)) if group else None
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
            requests.ask(paths.requests, "retry", shapes=list(ids))
        print(f"{len(ids)} failed shapes queued again; watch: gemmfleet status {shown(paths)} --watch")
        return 0
    if not json_:
        print(f"trying {len(ids)} failed shapes again")
    return go(paths, json_=json_, retry=ids)


def cancel(paths: RunPaths) -> None:
    """Stop the run: through its controller where one lives, else at the nodes directly."""
    from orchestrator.dispatch import requests
    from orchestrator.dispatch.lock import holder
    from orchestrator.drive import drive
    from orchestrator.ledger import LedgerReader

    who = holder(paths.lock)
    if not who:
        drive(paths, _Quiet(), cancel=True)
        print(f"run {paths.root.name} cancelled; no controller was driving it, and no worker is left")
        return
    requests.ask(paths.requests, "cancel")
    until = time.monotonic() + 60.0
    while time.monotonic() < until:
        if not holder(paths.lock):
            with LedgerReader.open_readonly(paths.ledger) as ledger:
                print(f"run {paths.root.name} is {ledger.state}; no worker is left")
            return
        time.sleep(0.1)
    raise InputError(f"the controller (process {who.get('pid')}) did not end within 60 s; end it and run cancel again")
