"""Report at the end of a run or a bench: results, failures with reasons, files, exit code, and the next commands."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from orchestrator.cli.printer import MOST_ROWS, Cell, Page, plain
from orchestrator.command_hints import command
from orchestrator.controller.limits import won_so_far, worths_of
from orchestrator.errors import InputError
from orchestrator.families import get_family
from orchestrator.ledger.reader import NOT_WORTH_IT, LedgerReader, LeftOut, ProfileRow, ShapeState, keeps_today
from orchestrator.paths import RunConfig, RunPaths, runs_option
from orchestrator.reasons import Reason
from orchestrator.results.bench import BenchResults, Result, fastest
from orchestrator.results.export import unpromised
from orchestrator.results.recheck import gains, noise_note
from orchestrator.shapes.model import describe
from orchestrator.view.status import flag_words, sessions_until
from orchestrator.view.words import worked_words
from worker.families import Family
from worker.protocol.bench import HARMLESS, TIMERS
from worker.text import and_more, plural
from worker.tuners.catalog import recorded_tuner

if TYPE_CHECKING:
    from orchestrator.tables.merge import MergeReport

EXIT = {"finished": 0, "interrupted": 130, "cancelled": 130}


def end_page(paths: RunPaths, state: str, *, alone: bool = True) -> Page:
    """Merge into the run's tuned DB if it has one, and return the report of the run or the bench. `alone`: False for
    a part of a command that itself says what comes next."""
    config = RunConfig.read(paths.config)
    with LedgerReader.open_readonly(paths.ledger) as ledger:
        if recorded_tuner(config.tuner).side_by_side:
            return bench_page(BenchResults.of_run(ledger, paths, config.options), state)
        c, known = ledger.counts(), ledger.replayed
        winners, failed, unconfirmed = ledger.winners(), ledger.failed(), ledger.unconfirmed()
        vs_median, noisy = gains(ledger, [w.shape for w in winners[:MOST_ROWS]]), ledger.noisy()
        outside, flags, worths = unpromised(ledger), flag_words(known), worths_of(ledger)
        value = won_so_far(ledger, worths) if worths else None
        left = [s.detail for s in ledger.shapes("skipped") if s.reason == NOT_WORTH_IT]
        took = worked_words(sessions_until(known, ledger.meta("ended")))
    shared = sorted(n.name for n in known.nodes.values() if any(to == "shared" for _, to, _ in n.history))
    report, refused = _merge(config, paths) if config.db and winners else (None, None)
    code = EXIT[state] or (2 if refused else 1 if failed else 0)
    unsettled = state != "finished" and c.total > c.settled
    merged = config.db is not None and refused is None
    reasons = {f.reason for f in failed if f.reason}
    steps = next_steps(paths, config, tuned=c.tuned, reasons=reasons, unsettled=unsettled, merged=merged)
    page = Page({
        "run": paths.run, "state": state, "exit_code": code, "shapes": c.to_json(), "files": _files(paths),
        "next": [command(words) for words, _ in steps], "failed": _failures(failed),
        "unconfirmed": [
            {"shape": describe(u.key), "node": u.node, "slot": u.slot, "why": u.detail,
             "withheld": [w.to_json() for w in left_out]} for u, left_out in unconfirmed
        ],
        "standing_out": flags, "unpromised": outside, "merge": report.to_json() if report else None,
        "merge_refused": list(refused.faults) if refused else [],
        **({"value": {**asdict(value), "share_of_expected": value.share}} if value else {}),
    }, code)  # fmt: skip
    add_winners(page, winners, vs_median, noisy)
    if noisy:
        page.line(f"! {noise_note([describe(w.key) for w in winners if w.shape in noisy], paths.named)}")
    page.lines((
        f"! {describe(f.key)} failed: {f.reason}{'' if f.confirmed else ' (unconfirmed)'}"
        f"{f' on {f.node} slot {f.slot}' if f.node else ''}: {f.detail}" for f in failed
    ), "failed shape", more="all in failed.csv")  # fmt: skip
    add_unconfirmed(page, unconfirmed)
    if config.db is None and alone:
        page.line("no --db was given: nothing was skipped and nothing merged")
    if report is not None:
        page.lines((
            f"{config.db}: {row.action} {describe(v for n, v in row.key.items() if n != 'cu_num')}  "
            f"{row.times}  {row.why}" for row in report.rows
        ), more=f"all in {paths.merge.name}")  # fmt: skip
        page.line(*[f"{config.db}: the old table is kept as {report.backup}"] * bool(report.backup))
        page.line(*(f"note: {note}" for note in report.notes))
    if refused is not None:
        page.aside(*(f"error: {fault}" for fault in refused.faults))
        merging = f"db merge {quote(str(paths.root))} --into {quote(str(config.db))}"
        page.line(f"nothing was merged into {config.db}; later: {command(merging)}")
    page.line(*(f"! {words}" for words in (*outside, *flags)))
    if value is not None:
        won, total = value.won_us / 1e3, value.total_us / 1e3
        guess = f"; {value.guessed_us / value.total_us:.0%} of that time is a guess (column now_us)"
        guess = guess if value.guessed_us else ""
        page.line(f"won {won / total:.1%} of the workload's GEMM time, {won:.3f} of {total:.3f} ms{guess}")
        page.line(f"  that is {value.share:.1%} of what tuning every shape is expected to win")
        if left:
            of = f"{plural(len(left), 'shape')} not worth it: {left[0]}"
            page.line(f"{of}; with a higher limit, this goes on with them: {command(f'resume {paths.named}')}")
    page.line(*(
        f"note: {node} ran beside other jobs (--busy share): its times may be too long; see:"
        f" {command(f'explain {paths.run} {node}{runs_option(paths.root.parent)}')}"
        for node in shared
    ))  # fmt: skip
    counts = ((c.skipped, "skipped"), (c.failed, "failed"), (c.pending + c.running, "pending"))
    parts = [f"{c.tuned} tuned", *(f"{n} {word}" for n, word in counts if n)]
    took = f" in {took}" if took else ""
    page.line(f"run {paths.run} {state}{took}: {plural(c.total, 'shape')}: {', '.join(parts)}")
    page.line(*(f"  {path}" for path in _files(paths).values()))
    page.line(*next_lines(steps if alone else ()))
    return page


def _merge(config: RunConfig, paths: RunPaths) -> tuple[MergeReport | None, InputError | None]:
    """Merge the run's winners from its ledger into its tuned DB, and keep the report in its folder.

    Returns (the report, None), or (None, the error) where the merge was refused; the results of the run stay.
    """
    from orchestrator.files.write import write_atomic
    from orchestrator.results.export import RunFacts, candidates, winners
    from orchestrator.tables.merge import merge

    try:
        with LedgerReader.open_readonly(paths.ledger) as ledger:
            report = merge(
                winners(ledger), Path(str(config.db)), ledger.family, profile=candidates(ledger),
                facts=RunFacts(paths.root), err_ratio=config.err_ratio,
            )  # fmt: skip
    except InputError as e:
        return None, e
    write_atomic(paths.merge, json.dumps(report.to_json(), indent=1) + "\n")
    return report, None


def _files(paths: RunPaths) -> dict[str, str]:
    """Return the path of each result file that the run has, by name."""
    return {p.name: str(p) for p in paths.results() if p.exists()}


def _failures(failed: Sequence[ShapeState]) -> list[dict[str, Any]]:
    return [{"shape": describe(f.key), "reason": f.reason, "detail": f.detail} for f in failed]


def add_winners(
    page: Page, winners: Sequence[ProfileRow], gains: Mapping[int, float], noisy: Container[int] = ()
) -> None:
    """Add the winners with their times. A last column names the noisy ones, and those that change nothing."""
    notes = {w.shape: "noisy" for w in winners if w.shape in noisy}
    notes |= {w.shape: "keeps today's entry" for w in winners if keeps_today(w.row)}
    rows = []
    for w in winners:
        gain, tflops = gains.get(w.shape), f"{w.row['tflops']:.4g}" if "tflops" in w.row else ""
        row = (describe(w.key), plain(w.kernel_name, 60), f"{w.us:.2f}", tflops, "" if gain is None else f"{gain:.2f}x")
        rows.append((*row, notes.get(w.shape, "")) if notes else row)
    heads = ["shape", "best kernel", "us", "TFLOPS", "vs median"]
    if notes:
        heads.append("note")
    page.table(heads, rows, right=heads[2:5], more="all in tuned.csv")


def add_unconfirmed(page: Page, unconfirmed: Sequence[tuple[ShapeState, Sequence[LeftOut]]]) -> None:
    """Add the winners that rest on one slot's evidence alone."""
    if not unconfirmed:
        return
    names = and_more([describe(u.key) for u, _ in unconfirmed], 4)
    left_out = plural(sum(len(ws) for _, ws in unconfirmed), "candidate")
    places = sorted({f"{w.node} slot {w.slot}" for _, ws in unconfirmed for w in ws})
    where = f" on {' and '.join(places[:4])}" if places else ""
    n = plural(len(unconfirmed), "shape")
    page.line(f"! {n} unconfirmed: {names}: {left_out} faulted{where}, and no second slot could try them")
    page.line("  they may be faster than what is in tuned.csv; provenance.json lists them")


def next_steps(
    paths: RunPaths, config: RunConfig, *, tuned: int, reasons: Collection[str], unsettled: bool, merged: bool
) -> list[tuple[str, str]]:
    """Return the next commands for a run that ended so: (words of the command, its purpose), most useful first.
    `reasons`: why shapes failed. `merged`: its table took the winners."""
    name, family, produces = paths.named, get_family(config.family), recorded_tuner(config.tuner).produces
    if unsettled:
        return [(f"resume {name}", "continues with the rest")]
    steps = [(f"explain {name}", "why shapes failed")] if reasons else []
    # the tuner's verdict on a shape, such as `unsupported`, is the same the next time
    if any(not Reason(reason).is_verdict for reason in reasons):
        steps.append((f"retry {name}", "try them again"))
    if not tuned:
        return steps or [(f"status {name}", "shapes, nodes and progress")]
    if produces == "configs":
        into = f"configs merge {quote(str(paths.root))} --into TREE"
        return [*steps, (into, "write the winners into the config files"), (f"report {name}", "write the page")]
    own = produces == "own"  # AITER reads no such table
    table = f"{family.name}-{config.tuner}.csv" if own else family.tuned_csv
    if config.db is None:
        steps.append((f"db merge {quote(str(paths.root))} --into {quote(table)}", "merge the winners into a table"))
    steps.append((f"report {name}", "write the page"))
    if not own:
        steps.append((f"verify {name}", "check that AITER uses them correctly"))
        table = str(config.db if merged else paths.tuned)
        steps.append((f"db export {quote(table)} --env", "environment lines for a server"))
    return steps


def next_lines(steps: Sequence[tuple[str, str]]) -> list[str]:
    """Return a line for each command, with its purpose."""
    typed = [command(words) for words, _ in steps]
    wide = max((len(t) for t in typed), default=0)
    heads = ("next:", *["     "] * len(steps))
    return [f"{head} {text:{wide}}  # {why}" for head, text, (_, why) in zip(heads, typed, steps, strict=False)]


def bench_page(of: BenchResults, state: str) -> Page:
    """Return the report of a bench; the exit code is 1 if a shape has no number or a backend was at fault."""
    stacks, absent = of.stacks, missing_results(of.found)
    devices = sorted({str(s.get("device", "")) for s in stacks.values()} - {""})
    on_cpu = any(str(s.get("gfx", "")).startswith("cpu") for s in stacks.values())
    code = EXIT[state] or int(of.measured < of.total or of.at_fault)
    page = Page({
        "run": of.paths.run, "state": state, "exit_code": code,
        "shapes": {"total": of.total, "measured": of.measured}, "devices": devices, "cpu": on_cpu,
        "environments": stacks, "rows": [_row(r, of.family) for r in of.found], "missing": absent,
        "failed": _failures(of.failed), "files": _files(of.paths),
    }, code)  # fmt: skip
    add_results(page, of.found)
    for item in absent:
        where = f" in {item['env']}" if item["env"] else ""
        page.line(f"{item['backend']}{where}: {item['status']} for {plural(item['shapes'], 'shape')}: {item['detail']}")
    known = {r.key for r in of.found}
    page.line(*(f"! {describe(f.key)} failed: {f.reason}: {f.detail}" for f in of.failed if f.key not in known))
    plain = sorted({r.timer for r in of.found} - {"", *TIMERS})
    page.line(*(f"timed plainly, as in the FP4 guide ({how}): noisier than without --iters" for how in plain))
    page.line(*(f"measured on {'the CPU ' if on_cpu else ''}{device}" for device in devices))
    loose, short = (sum(r.status == status for r in of.found) for status in ("unstable", "short"))
    words = f"run {of.paths.run} {state}: {plural(of.total, 'shape')}, {of.measured} with a number"
    words += f"; {plural(loose, 'result')} whose runs disagree (~)" if loose else ""
    words += f"; {short} with fewer runs than --repeats (~)" if short else ""
    page.line(words, *(f"  {path}" for path in _files(of.paths).values()))
    measured = {r.env for r in of.found}
    sides = [quote(str(of.paths.root / f"{env}.csv")) for env in of.stacks if env and env in measured]
    then = f"compare {' '.join(sides[:2])}" if len(sides) > 1 else f"analyze {of.paths.named}"
    then = f"resume {of.paths.named}" if state != "finished" and of.measured < of.total else then
    page.line(f"next: {command(then)}")
    return page


def add_results(page: Page, found: Sequence[Result]) -> None:
    """Add TFLOPS, a row for each shape: the fastest of an environment in bold, `~` if its runs disagree."""
    columns = list(dict.fromkeys((r.env, r.backend) for r in found))
    heads = [f"{env}: {backend}" if env else backend for env, backend in columns]
    best = fastest(found)
    by_shape: dict[int, dict[tuple[str, str], Result]] = {}
    for r in found:
        by_shape.setdefault(r.shape, {})[r.env, r.backend] = r
    rows: list[list[Cell]] = []
    for shape, mine in by_shape.items():
        cells = [_cell(mine.get(c), best.get((shape, c[0]))) for c in columns]
        won = [w for (s, _), w in best.items() if s == shape]
        names, speeds = dict.fromkeys(w.backend for w in won), [f"{w.bw:,.0f}" for w in won]
        rows.append([describe(next(iter(mine.values())).key), *cells, ", ".join(names), ", ".join(speeds)])
    right, more = [*heads, "its GB/s"], "all in bench.csv"
    page.table(("shape", *heads, "fastest", "its GB/s"), rows, "shape", right=right, more=more, caption="TFLOPS")


def missing_results(found: Sequence[Result]) -> list[dict[str, Any]]:
    """Return why backends have no result, with the number of shapes of each reason."""
    counts = Counter((r.env, r.backend, r.status, r.detail) for r in found if not r.measured)
    return [
        {"env": env, "backend": backend, "status": status, "shapes": n, "detail": detail}
        for (env, backend, status, detail), n in counts.items()
    ]


def _cell(r: Result | None, best: Result | None) -> Cell:
    if r is None:
        return ""
    if not r.measured:
        return ("-", "dim") if r.status in HARMLESS else (r.status, "red")
    return (f"{r.tflops:.4g}{'' if r.status == 'ok' else '~'}", "bold" if r is best else "")


def _row(r: Result, family: Family) -> dict[str, Any]:
    key, runs = dict(zip(family.key_names, r.key, strict=True)), [{"run": n, "us": us} for n, us in r.runs]
    return {**asdict(r), "key": key, "runs": runs}
