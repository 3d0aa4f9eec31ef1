"""The page of a run that ended: results, failures with reasons, files, exit code, and the next commands.

It shows what `results/run_end.py` read and merged, and changes nothing. A bench has a page of its own, `bench_page.py`.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict
from shlex import quote
from typing import Any, NamedTuple

from orchestrator.cli.printer import plain
from orchestrator.command_hints import command
from orchestrator.errors import InputError
from orchestrator.families import get_family
from orchestrator.ledger.blocked import BlockedCandidate
from orchestrator.ledger.reader import ProfileRow, ShapeState, keeps_today
from orchestrator.pages import Page
from orchestrator.paths import RunConfig, RunPaths, runs_option
from orchestrator.planning.worth import Gain
from orchestrator.reasons import Reason
from orchestrator.results.gain import noise_note
from orchestrator.results.run_end import RunEnd
from orchestrator.shapes.model import describe
from orchestrator.tables.merge import MergeReport
from orchestrator.view.formatting import describe_work_time
from orchestrator.view.slot_speed import describe_flags
from orchestrator.view.status import sessions_until
from worker.text import and_more, plural
from worker.tuners.catalog import recorded_tuner

EXIT_CODES = {"finished": 0, "interrupted": 130, "cancelled": 130}
"""Exit code by the state in which a run ended. 130 comes before every other code; where it is 0, `_exit_code` looks at
refusals and failed shapes."""
FAILED_SHAPES = 1
"""Exit code of a finished run in which shapes failed."""
WIDEST_KERNEL = 60


class NextCommand(NamedTuple):
    """A command that the user may want next. `words`: what is typed behind `gemmfleet`."""

    words: str
    purpose: str


def end_page(run: RunEnd, *, alone: bool = True) -> Page:
    """Return the report of a run. `alone`: False for a part of a command that itself says what comes next."""
    paths = run.paths
    results = run.results
    flags = describe_flags(run.replayed)
    steps = next_steps(run)
    code = _exit_code(run)
    page = Page(
        {
            "run": paths.run,
            "state": run.state,
            "exit_code": code,
            "shapes": results.counts.to_json(),
            "files": result_files(paths),
            "next": [command(step.words) for step in steps],
            "failed": describe_failures(results.failed),
            "unconfirmed": [_unconfirmed_document(shape, blocked) for shape, blocked in results.unconfirmed],
            "standing_out": flags,
            "unpromised": run.unpromised,
            "merge": run.merge.to_json() if run.merge else None,
            "merge_refused": list(run.refusal.faults) if run.refusal else [],
            **({"value": {**asdict(run.won), "share_of_expected": run.won.share}} if run.won else {}),
        },
        code,
    )
    add_winners(page, results.winners, run.gains, results.noisy)
    if results.noisy:
        noisy = [describe(winner.key) for winner in results.winners if winner.shape in results.noisy]
        page.line(f"! {noise_note(noisy, paths.named)}")
    page.lines(map(_describe_failure, results.failed), "failed shape", more="all in failed.csv")
    add_unconfirmed(page, results.unconfirmed)
    if run.config.db is None and alone:
        page.line("no --db was given: nothing was skipped and nothing merged")
    if run.merge is not None:
        _add_merge(page, run.merge, paths, run.config)
    if run.refusal is not None:
        _add_refusal(page, run.refusal, paths, run.config)
    page.line(*(f"! {words}" for words in (*run.unpromised, *flags)))
    if run.won is not None:
        _add_gain(page, run.won, run.not_worth_it, paths)
    for node in run.shared_nodes:
        story = command(f"explain {paths.run} {node}{runs_option(paths.root.parent)}")
        may_have = "other jobs may have run beside ours, and its times may be too long"
        page.line(f"note: {node} was shared (--busy share): {may_have}; see: {story}")
    page.line(_summarize(run))
    page.line(*(f"  {path}" for path in result_files(paths).values()))
    if alone:
        page.line(*next_lines(steps))
    return page


def _exit_code(run: RunEnd) -> int:
    """Return 130 if the run did not finish, 2 if its table took no winner, 1 if a shape failed."""
    if EXIT_CODES[run.state]:
        return EXIT_CODES[run.state]
    if run.refusal:
        return 2
    return FAILED_SHAPES if run.results.failed else 0


def _unconfirmed_document(shape: ShapeState, blocked: Sequence[BlockedCandidate]) -> dict[str, Any]:
    return {
        "shape": describe(shape.key),
        "node": shape.node,
        "slot": shape.slot,
        "why": shape.detail,
        "withheld": [candidate.to_json() for candidate in blocked],
    }


def _describe_failure(shape: ShapeState) -> str:
    unconfirmed = "" if shape.confirmed else " (unconfirmed)"
    where = f" on {shape.node} slot {shape.slot}" if shape.node else ""
    return f"! {describe(shape.key)} failed: {shape.reason}{unconfirmed}{where}: {shape.detail}"


def _add_merge(page: Page, report: MergeReport, paths: RunPaths, config: RunConfig) -> None:
    lines = []
    for row in report.rows:
        shape = describe(value for name, value in row.key.items() if name != "cu_num")
        lines.append(f"{config.db}: {row.action} {shape}  {row.times}  {row.why}")
    page.lines(lines, more=f"all in {paths.merge.name}")
    if report.backup:
        page.line(f"{config.db}: the old table is kept as {report.backup}")
    page.line(*(f"note: {note}" for note in report.notes))


def _add_refusal(page: Page, refusal: InputError, paths: RunPaths, config: RunConfig) -> None:
    page.aside(*(f"error: {fault}" for fault in refusal.faults))
    later = command(f"db merge {quote(str(paths.root))} --into {quote(str(config.db))}")
    page.line(f"nothing was merged into {config.db}; later: {later}")


def _add_gain(page: Page, won: Gain, not_worth_it: Sequence[str], paths: RunPaths) -> None:
    """Add the share of the workload's time that a run with --by-value won, and what it left out at its limit."""
    won_ms = won.won_us / 1e3
    total_ms = won.total_us / 1e3
    guess = ""
    if won.guessed_us:
        guess = f"; {won.guessed_us / won.total_us:.0%} of that time is a guess (column now_us)"
    page.line(f"won {won_ms / total_ms:.1%} of the workload's GEMM time, {won_ms:.3f} of {total_ms:.3f} ms{guess}")
    page.line(f"  that is {won.share:.1%} of what tuning every shape is expected to win")
    if not_worth_it:
        shapes = f"{plural(len(not_worth_it), 'shape')} not worth it: {not_worth_it[0]}"
        resume = command(f"resume {paths.named}")
        page.line(f"{shapes}; with a higher limit, this goes on with them: {resume}")


def _summarize(run: RunEnd) -> str:
    """Return `run R finished in 2 min 05 s: 32 shapes: 30 tuned, 2 failed`."""
    counts = run.results.counts
    parts = [f"{counts.tuned} tuned"]
    open_shapes = counts.pending + counts.running
    for n, word in ((counts.skipped, "skipped"), (counts.failed, "failed"), (open_shapes, "pending")):
        if n:
            parts.append(f"{n} {word}")
    worked = describe_work_time(sessions_until(run.replayed, run.ended))
    state = f"{run.state} in {worked}" if worked else run.state
    return f"run {run.paths.run} {state}: {plural(counts.total, 'shape')}: {', '.join(parts)}"


def result_files(paths: RunPaths) -> dict[str, str]:
    """Return the path of each result file that the run has, by name."""
    return {p.name: str(p) for p in paths.results() if p.exists()}


def describe_failures(failed: Sequence[ShapeState]) -> list[dict[str, Any]]:
    return [{"shape": describe(shape.key), "reason": shape.reason, "detail": shape.detail} for shape in failed]


def add_winners(
    page: Page, winners: Sequence[ProfileRow], gains: Mapping[int, float], noisy: Container[int] = ()
) -> None:
    """Add the winners with their times. A last column names the noisy ones, and those that change nothing."""
    notes = {}
    for winner in winners:
        if winner.shape in noisy:
            notes[winner.shape] = "noisy"
        if keeps_today(winner.row):
            notes[winner.shape] = "keeps today's entry"
    rows = []
    for winner in winners:
        gain = gains.get(winner.shape)
        row = [
            describe(winner.key),
            plain(winner.kernel_name, WIDEST_KERNEL),
            f"{winner.us:.2f}",
            f"{winner.row['tflops']:.4g}" if "tflops" in winner.row else "",
            "" if gain is None else f"{gain:.2f}x",
        ]
        if notes:
            row.append(notes.get(winner.shape, ""))
        rows.append(row)
    numeric = ("us", "TFLOPS", "vs median")
    heads = ["shape", "best kernel", *numeric]
    if notes:
        heads.append("note")
    page.table(heads, rows, right=numeric, more="all in tuned.csv")


def add_unconfirmed(page: Page, unconfirmed: Sequence[tuple[ShapeState, Sequence[BlockedCandidate]]]) -> None:
    """Add the winners for which a faster candidate may have been left out, because one slot alone saw it fault."""
    if not unconfirmed:
        return
    names = and_more([describe(shape.key) for shape, _ in unconfirmed], 4)
    candidates = [candidate for _, blocked in unconfirmed for candidate in blocked]
    slots = sorted({f"{candidate.node} slot {candidate.slot}" for candidate in candidates})
    where = f" on {' and '.join(slots[:4])}" if slots else ""
    faulted = f"{plural(len(candidates), 'candidate')} faulted{where}, and no second slot could try them"
    page.line(f"! {plural(len(unconfirmed), 'shape')} unconfirmed: {names}: {faulted}")
    page.line("  they may be faster than what is in tuned.csv; provenance.json lists them")


def next_steps(run: RunEnd) -> list[NextCommand]:
    """Return the next commands for a run by how it ended, the most useful first."""
    name = run.paths.named
    if run.is_unsettled:
        return [NextCommand(f"resume {name}", "continues with the rest")]
    steps = []
    reasons = {shape.reason for shape in run.results.failed if shape.reason}
    if reasons:
        steps.append(NextCommand(f"explain {name}", "why shapes failed"))
    # the tuner's verdict on a shape, such as `unsupported`, is the same the next time
    if any(not Reason(reason).is_verdict for reason in reasons):
        steps.append(NextCommand(f"retry {name}", "try them again"))
    if run.results.counts.tuned:
        return steps + _steps_with_winners(run)
    return steps or [NextCommand(f"status {name}", "shapes, nodes and progress")]


def _steps_with_winners(run: RunEnd) -> list[NextCommand]:
    """Return what can be done with the winners, by what the run's tuner produces."""
    name = run.paths.named
    folder = quote(str(run.paths.root))
    produces = recorded_tuner(run.config.tuner).produces
    report = NextCommand(f"report {name}", "write the page")
    if produces == "configs":
        merge = NextCommand(f"configs merge {folder} --into TREE", "write the winners into the config files")
        return [merge, report]
    steps = [report]
    is_for_aiter = produces != "own"
    if run.config.db is None:
        family = get_family(run.config.family)
        table = family.tuned_csv if is_for_aiter else f"{family.name}-{run.config.tuner}.csv"
        merge = NextCommand(f"db merge {folder} --into {quote(table)}", "merge the winners into a table")
        steps.insert(0, merge)
    if is_for_aiter:
        table = str(run.config.db if run.is_merged else run.paths.tuned)
        steps.append(NextCommand(f"verify {name}", "check that AITER uses them correctly"))
        steps.append(NextCommand(f"db export {quote(table)} --env", "environment lines for a server"))
    return steps


def next_lines(steps: Sequence[NextCommand]) -> list[str]:
    """Return a line for each command, with its purpose; `next:` stands before the first."""
    typed = [command(step.words) for step in steps]
    widest = max((len(text) for text in typed), default=0)
    lines: list[str] = []
    for text, step in zip(typed, steps, strict=True):
        lines.append(f"{'     ' if lines else 'next:'} {text:{widest}}  # {step.purpose}")
    return lines
