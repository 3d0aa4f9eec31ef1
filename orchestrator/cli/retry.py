"""`gemmfleet retry`: queue failed shapes or noisy winners of a run again."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated

import typer

from orchestrator.cli.driving import drive_here
from orchestrator.cli.options import JsonOpt, RunArg, RunsOpt
from orchestrator.command_hints import command
from orchestrator.errors import InputError, RunBusyError
from orchestrator.ledger.reader import LedgerReader
from orchestrator.pages import Page
from orchestrator.paths import DEFAULT_RUNS, RunPaths, find_run, holder, leave_request
from orchestrator.reasons import Reason
from worker.text import did_you_mean, plural


def retry(
    run: RunArg = None,
    runs: RunsOpt = DEFAULT_RUNS,
    reason: Annotated[str | None, typer.Option(help="Only shapes that failed for this reason.")] = None,
    group: Annotated[str | None, typer.Option(help="Only shapes of this group.", metavar="G")] = None,
    noisy: Annotated[bool, typer.Option("--noisy", help="Noisy winners, not failed shapes.")] = False,
    json_: JsonOpt = False,
) -> Page:
    """Queue the failed shapes of a run again, with fresh tries."""
    if noisy and reason is not None:
        raise InputError("--noisy and --reason: a noisy winner did not fail; leave one of them out")
    paths = find_run(runs, run)
    with LedgerReader.open_readonly(paths.ledger) as ledger:
        _check_names(paths, ledger, reason, group)
        shapes = list(ledger.noisy()) if noisy else [shape.id for shape in ledger.failed(reason)]
        if group is not None:
            members = set(ledger.replayed.attempts[group].shapes)
            shapes = [shape for shape in shapes if shape in members]
        reasons = list(ledger.failures())
        pending = ledger.counts().pending
    page = Page({"run": paths.run, "queued": len(shapes)})
    if not shapes:
        page.line(f"nothing to retry: {_describe_nothing(reason, group, reasons, noisy=noisy)}")
        if pending and not noisy and not holder(paths.lock):
            page.line(f"{plural(pending, 'shape')} pending; go on with: {command(f'resume {paths.named}')}")
        return page
    shapes_in_words = plural(len(shapes), "noisy winner" if noisy else "failed shape")
    if holder(paths.lock):
        with contextlib.suppress(RunBusyError):
            leave_request(paths.requests, "retry", shapes=shapes)
        page.line(f"{shapes_in_words} queued again; watch: {command(f'status {paths.named} --watch')}")
        return page
    print(f"trying {shapes_in_words} again", file=sys.stderr if json_ else sys.stdout)
    return drive_here(paths, json_=json_, retry=tuple(shapes))


def _describe_nothing(reason: str | None, group: str | None, reasons: list[str], *, noisy: bool) -> str:
    """Return why no shape is queued. `reasons`: those of the run's failed shapes."""
    if noisy:
        return "no winner is noisy"
    which = ""
    if reason:
        which += f" with reason {reason!r}"
    if group:
        which += f" with group {group!r}"
    if not reasons:
        return f"no failed shape{which}"
    return f"no failed shape{which} (failed shapes have: {', '.join(reasons)})"


def _check_names(paths: RunPaths, ledger: LedgerReader, reason: str | None, group: str | None) -> None:
    """Raise InputError where no shape can fail for the reason, or the run has no such group."""
    known_reasons = [r.value for r in Reason if r.fails_shapes]
    if reason is not None and reason not in known_reasons:
        near = did_you_mean(reason, known_reasons)
        raise InputError(
            f"--reason {reason!r} is not a reason for which a shape fails{near} (there are: {', '.join(known_reasons)})"
        )
    groups = list(ledger.replayed.attempts)
    if group is not None and group not in groups:
        near = did_you_mean(group, groups)
        listing = command(f"explain {paths.named}")
        raise InputError(f"run {paths.run} has no group {group!r}{near} ({listing} lists them)")
