"""Report at the end of a run or a bench: results, failures with reasons, files, exit code, and the next commands."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from orchestrator.cli.output.terminal import MOST_ROWS, console, plain, table
from orchestrator.command_hints import command
from orchestrator.errors import InputError
from orchestrator.families import get_family
from orchestrator.ledger import LedgerReader, LeftOut, ProfileRow, ShapeState
from orchestrator.ledger.model import NOT_WORTH_IT
from orchestrator.paths import RunConfig, RunPaths
from orchestrator.planning.value import Won
from orchestrator.results.bench import HARMLESS, BenchResults, Result, fastest
from orchestrator.results.export import unpromised
from orchestrator.results.gain import NOISY_GAIN, gains, noise_note
from orchestrator.run.limits import won_so_far, worths_of
from orchestrator.shapes import describe
from orchestrator.view.status import flag_words, sessions_until
from orchestrator.view.words import worked_words
from worker.families import Family
from worker.text import and_more, plural
from worker.tuners.catalog import recorded_tuner

if TYPE_CHECKING:
    from orchestrator.tables.merge import MergeReport
    from worker.families import Family

EXIT = {"finished": 0, "interrupted": 130, "cancelled": 130}


def report_end(paths: RunPaths, state: str, *, json_: bool) -> int:
    """Merge into the run's tuned DB if it has one, print the report, and return the exit code."""
    config = RunConfig.read(paths.config)
    if recorded_tuner(config.tuner).side_by_side:
        return report_bench(paths, config, state, json_=json_)
    with LedgerReader.open_readonly(paths.ledger) as ledger:
        counts, family = ledger.counts(), ledger.family
        winners, failed, unconfirmed = ledger.winners(), ledger.failed(), ledger.unconfirmed()
        vs_median = gains(ledger, [w.shape for w in winners[:MOST_ROWS]]) if winners and not json_ else {}
        outside, flags = unpromised(ledger), flag_words(ledger.replayed)
        worths = worths_of(ledger)
        value = won_so_far(ledger, worths) if worths else None
        left = [s.detail for s in ledger.shapes("skipped") if s.reason == NOT_WORTH_IT]
    report, refused = merge_winners(config, family, paths) if config.db and winners else (None, None)
    code = EXIT[state] or (2 if refused else 1 if failed else 0)
    if json_:
        document = {
            "run": paths.run, "state": state, "exit_code": code, "shapes": counts.to_json(),
            "files": _files(paths),
            "failed": [
                {"shape": describe(f.key), "reason": f.reason, "detail": f.detail} for f in failed
            ],
            "unconfirmed": [
                {
                    "shape": describe(u.key), "node": u.node, "slot": u.slot, "why": u.detail,
                    "withheld": [w.to_json() for w in left_out],
                }
                for u, left_out in unconfirmed
            ],
            "standing_out": flags,
            "unpromised": outside, "merge": report.to_json() if report else None,
            "merge_refused": list(refused.faults) if refused else [],
            **({"value": {**asdict(value), "share_of_expected": value.share}} if value else {}),
        }  # fmt: skip
        print(json.dumps(document, indent=1))
        return code
    _print_winners(winners, vs_median)
    _print_failed(failed)
    _print_unconfirmed(unconfirmed)
    _print_merge(config, report)
    _print_refused(paths, config, refused)
    for words in [*outside, *flags]:
        print(f"! {plain(words)}")
    if value is not None:
        _print_value(value, left)
    _print_summary(paths, config, state, failed)
    return code


def merge_winners(config: RunConfig, family: Family, paths: RunPaths) -> tuple[MergeReport | None, InputError | None]:
    """Merge the run's winners into its tuned DB, as `db merge RUN --into DB` does, and keep the report in its folder.

    Returns (the report, None), or (None, the error) where the merge was refused; the results of the run stay.
    """
    from orchestrator.results.run_facts import RunFacts
    from orchestrator.tables.merge import merge
    from orchestrator.tables.sources import open_sources
    from orchestrator.userfiles import write_atomic

    assert config.db is not None
    into = Path(config.db)
    try:
        sources = open_sources([paths.root], [], into, family.name, RunFacts)
        report = merge(
            sources.newcomers(), into, family, profile=sources.beside(), facts=sources.facts, err_ratio=config.err_ratio
        )
    except InputError as e:
        return None, e
    write_atomic(paths.merge, json.dumps(report.to_json(), indent=1) + "\n")
    return report, None


def _files(paths: RunPaths) -> dict[str, str]:
    """Return the path of each result file that the run has, by name."""
    return {p.name: str(p) for p in paths.results() if p.exists()}


def _print_winners(winners: Sequence[ProfileRow], gains: Mapping[int, float]) -> None:
    if not winners:
        return
    noisy = {w.shape: describe(w.key) for w in winners[:MOST_ROWS] if gains.get(w.shape, 1.0) < NOISY_GAIN}
    heads = ("shape", "best kernel", "us", "TFLOPS", "vs median", *(["note"] if noisy else []))
    t = table(*heads, right=("us", "TFLOPS", "vs median"))
    for w in winners[:MOST_ROWS]:
        gain = gains.get(w.shape)
        t.add_row(
            describe(w.key), plain(w.kernel_name, 60), f"{w.us:.2f}",
            f"{w.row['tflops']:.4g}" if "tflops" in w.row else "", "" if gain is None else f"{gain:.2f}x",
            *(["noisy" if w.shape in noisy else ""] if noisy else []),
        )  # fmt: skip
    console().print(t)
    if len(winners) > MOST_ROWS:
        print(f"... and {len(winners) - MOST_ROWS} more in tuned.csv")
    if note := noise_note(list(noisy.values())):
        print(f"! {note}")


def _print_failed(failed: Sequence[ShapeState]) -> None:
    for f in failed[:MOST_ROWS]:
        where = f" on {f.node} slot {f.slot}" if f.node else ""
        sure = "" if f.confirmed else " (unconfirmed)"
        print(f"! {describe(f.key)} failed: {f.reason}{sure}{where}: {plain(f.detail, 400)}")
    if len(failed) > MOST_ROWS:
        print(f"... and {len(failed) - MOST_ROWS} more in failed.csv")


def _print_unconfirmed(unconfirmed: Sequence[tuple[ShapeState, Sequence[LeftOut]]]) -> None:
    """Print the winners that rest on one slot's evidence alone."""
    if not unconfirmed:
        return
    names = and_more([describe(u.key) for u, _ in unconfirmed], 4)
    left_out = plural(sum(len(ws) for _, ws in unconfirmed), "candidate")
    places = sorted({f"{w.node} slot {w.slot}" for _, ws in unconfirmed for w in ws})
    where = f" on {' and '.join(places[:4])}" if places else ""
    n = plural(len(unconfirmed), "shape")
    print(f"! {n} unconfirmed: {names}: {left_out} faulted{where}, and no second slot could try them")
    print("  they may be faster than what is in tuned.csv; provenance.json lists them")


def _print_merge(config: RunConfig, report: MergeReport | None) -> None:
    if report is None:
        if config.db is None:
            print("no --db was given: nothing was skipped and nothing merged")
        return
    for row in report.rows[:MOST_ROWS]:
        old = "" if row.old_us is None else f"{row.old_us:g} us -> "
        new = "" if row.new_us is None else f"{row.new_us:g} us"
        print(f"{config.db}: {row.action} {describe(row.key.values())}  {old}{new}  {plain(row.why)}".rstrip())
    if report.backup:
        print(f"{config.db}: the old table is kept as {report.backup}")
    for note in report.notes:
        print(f"note: {note}")


def _print_value(w: Won, left: Sequence[str | None]) -> None:
    """Print the share of the workload's GEMM time that a run by value won, and why shapes are `left`."""
    won, total = w.won_us / 1e3, w.total_us / 1e3
    guessed = f"; {w.guessed_us / w.total_us:.0%} of that time is a guess (column now_us)" if w.guessed_us else ""
    print(f"won {won / total:.1%} of the workload's GEMM time, {won:.3f} of {total:.3f} ms{guessed}")
    print(f"  that is {w.share:.1%} of what tuning every shape is expected to win")
    if left:
        print(f"{plural(len(left), 'shape')} not worth it: {left[0]}; `resume` with a higher limit goes on with them")


def _print_refused(paths: RunPaths, config: RunConfig, refused: InputError | None) -> None:
    if refused is None:
        return
    for fault in refused.faults:
        print(f"error: {plain(fault)}", file=sys.stderr)
    merging = f"db merge {quote(str(paths.root))} --into {quote(str(config.db))}"
    print(f"nothing was merged into {config.db}; later: {command(merging)}")


def _print_summary(paths: RunPaths, config: RunConfig, state: str, failed: Sequence[ShapeState]) -> None:
    with LedgerReader.open_readonly(paths.ledger) as ledger:
        c, known = ledger.counts(), ledger.replayed
        took = worked_words(sessions_until(known, ledger.meta("ended")))
        shared = [n.name for n in known.nodes.values() if any(to == "shared" for _, to, _ in n.history)]
    took = f" in {took}" if took else ""
    parts = [f"{c.tuned} tuned"]
    parts += [
        f"{n} {w}" for n, w in ((c.skipped, "skipped"), (c.failed, "failed"), (c.pending + c.running, "pending")) if n
    ]
    for node in sorted(shared):
        print(f"note: {node} ran beside other jobs (--busy share): its times may be too long; see explain {node}")
    print(f"run {paths.run} {state}{took}: {plural(c.total, 'shape')}: {', '.join(parts)}")
    for path in _files(paths).values():
        print(f"  {path}")
    unsettled = state != "finished" and c.total > c.settled
    print_next(next_steps(paths, config, tuned=c.tuned, failed=c.failed, unsettled=unsettled))


def next_steps(
    paths: RunPaths, config: RunConfig, *, tuned: int, failed: int, unsettled: bool
) -> list[tuple[str, str]]:
    """Return the next commands for a run that ended so: (words of the command, its purpose), most useful first."""
    name, family = paths.named, get_family(config.family)
    if unsettled:
        return [(f"resume {name}", "continues with the rest")]
    steps: list[tuple[str, str]] = []
    if failed:
        steps += [(f"explain {name}", "why shapes failed"), (f"retry {name}", "try them again")]
    if not tuned:
        return [*steps, (f"status {name}", "shapes, nodes and progress")] if not failed else steps
    if recorded_tuner(config.tuner).produces == "configs":
        into = f"configs merge {quote(str(paths.root))} --into TREE"
        return [*steps, (into, "write the winners into AITER's config files"), (f"report {name}", "write the page")]
    own = recorded_tuner(config.tuner).produces == "own"  # AITER reads no such table
    table = f"{family.name}-{config.tuner}.csv" if own else family.tuned_csv
    if config.db is None:
        steps.append((f"db merge {quote(str(paths.root))} --into {quote(table)}", "merge the winners into a table"))
    steps.append((f"report {name}", "write the page"))
    if not own:
        steps.append((f"verify {name}", "check that AITER uses them correctly"))
        steps.append((f"db export {quote(config.db or str(paths.tuned))} --env", "environment lines for a server"))
    return steps


def print_next(steps: Sequence[tuple[str, str]]) -> None:
    """Print a command per line, each with its purpose."""
    typed = [command(words) for words, _ in steps]
    wide = max((len(t) for t in typed), default=0)
    for i, (text, (_, why)) in enumerate(zip(typed, steps, strict=True)):
        print(f"{'next:' if i == 0 else '     '} {text:{wide}}  # {why}")


def report_bench(paths: RunPaths, config: RunConfig, state: str, *, json_: bool) -> int:
    """Print how a run of the tuner bench went; the exit code."""
    with LedgerReader.open_readonly(paths.ledger) as ledger:
        found = BenchResults.of_run(ledger, paths, config.options)
    return finish_bench(found, state, json_=json_)


def finish_bench(of: BenchResults, state: str, *, json_: bool) -> int:
    """Print how a bench went, and return its exit code: 1 where a shape has no number or a backend was at fault."""
    stacks, absent = of.stacks, missing_results(of.found)
    devices = sorted({str(s.get("device", "")) for s in stacks.values()} - {""})
    on_cpu = any(str(s.get("gfx", "")).startswith("cpu") for s in stacks.values())
    code = EXIT[state] or int(of.measured < of.total or of.at_fault)
    if json_:
        document = {
            "run": of.paths.run, "state": state, "exit_code": code,
            "shapes": {"total": of.total, "measured": of.measured}, "devices": devices, "cpu": on_cpu,
            "environments": stacks, "rows": [_row(r, of.family) for r in of.found], "missing": absent,
            "failed": [{"shape": describe(f.key), "reason": f.reason, "detail": f.detail} for f in of.failed],
            "files": _files(of.paths),
        }  # fmt: skip
        print(json.dumps(document, indent=1))
        return code
    if of.found:
        console().print(bench_table(of.found))
    for item in absent:
        where = f" in {item['env']}" if item["env"] else ""
        shapes = plural(item["shapes"], "shape")
        print(f"{item['backend']}{where}: {item['status']} for {shapes}: {plain(item['detail'], 300)}")
    known = {r.key for r in of.found}
    for f in of.failed:
        if f.key not in known:
            print(f"! {describe(f.key)} failed: {f.reason}: {plain(f.detail, 300)}")
    for device in devices:
        print(f"measured on {'the CPU ' if on_cpu else ''}{plain(device, 100)}")
    _print_bench_summary(of, state)
    return code


def bench_table(found: Sequence[Result]) -> Table:
    """Return a table of TFLOPS, a row per shape: the fastest of an environment in bold, `~` where runs disagree."""
    columns = list(dict.fromkeys((r.env, r.backend) for r in found))
    heads = [f"{env}: {backend}" if env else backend for env, backend in columns]
    t = table("shape", *heads, "fastest", right=heads)
    best = fastest(found)
    by_shape: dict[int, dict[tuple[str, str], Result]] = {}
    for r in found:
        by_shape.setdefault(r.shape, {})[r.env, r.backend] = r
    for shape, mine in list(by_shape.items())[:MOST_ROWS]:
        cells = [_cell(mine.get(c), best.get((shape, c[0]))) for c in columns]
        winners = [w.backend for (s, _), w in best.items() if s == shape]
        key = next(iter(mine.values())).key
        t.add_row(describe(key), *cells, ", ".join(dict.fromkeys(winners)))
    if len(by_shape) > MOST_ROWS:
        t.caption = f"TFLOPS; {plural(len(by_shape) - MOST_ROWS, 'more shape')} in bench.csv"
    else:
        t.caption = "TFLOPS"
    return t


def missing_results(found: Sequence[Result]) -> list[dict[str, Any]]:
    """Return why backends have no result, with the number of shapes of each reason."""
    counts = Counter((r.env, r.backend, r.status, r.detail) for r in found if not r.measured)
    return [
        {"env": env, "backend": backend, "status": status, "shapes": n, "detail": detail}
        for (env, backend, status, detail), n in counts.items()
    ]


def _cell(r: Result | None, best: Result | None) -> Text:
    if r is None:
        return Text("")
    if not r.measured:
        return Text("-" if r.status in HARMLESS else r.status, style="dim" if r.status in HARMLESS else "red")
    words = f"{r.tflops:.4g}{'' if r.status == 'ok' else '~'}"
    return Text(words, style="bold" if r is best else "")


def _row(r: Result, family: Family) -> dict[str, Any]:
    made = asdict(r)
    made["key"] = dict(zip(family.key_names, r.key, strict=True))
    made["runs"] = [{"run": n, "us": us} for n, us in r.runs]
    return made


def _print_bench_summary(of: BenchResults, state: str) -> None:
    loose = sum(r.status == "unstable" for r in of.found)
    short = sum(r.status == "short" for r in of.found)
    words = f"run {of.paths.run} {state}: {plural(of.total, 'shape')}, {of.measured} with a number"
    words += f"; {plural(loose, 'result')} whose runs disagree (~)" if loose else ""
    words += f"; {short} with fewer runs than --repeats (~)" if short else ""
    print(words)
    for path in _files(of.paths).values():
        print(f"  {path}")
    if state != "finished" and of.measured < of.total:
        print(f"next: {command(f'resume {of.paths.named}')}")
        return
    measured = {r.env for r in of.found}
    sides = [quote(str(of.paths.root / f"{env}.csv")) for env in of.stacks if env and env in measured]
    if len(sides) > 1:
        golden, tot = sides[:2]
        print(f"next: {command(f'compare {golden} {tot}')}")
    else:
        print(f"next: {command(f'analyze {of.paths.named}')}")
