"""The page of a bench that ended: backends side by side, what is missing, files, and the next command."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from shlex import quote
from typing import Any

from orchestrator.cli.ending import EXIT_CODES, describe_failures, result_files
from orchestrator.command_hints import command
from orchestrator.pages import Cell, Page
from orchestrator.results.bench import BackendResult, BenchResults, fastest
from orchestrator.shapes.model import describe
from worker.families import Family
from worker.protocol.bench import HARMLESS, TIMERS
from worker.text import plural


def bench_page(bench: BenchResults, state: str) -> Page:
    """Return the report of a bench; the exit code is 1 if a shape has no number or a backend was at fault."""
    missing = missing_results(bench.results)
    devices = sorted({str(stack.get("device", "")) for stack in bench.stacks.values()} - {""})
    is_on_cpu = any(str(stack.get("gfx", "")).startswith("cpu") for stack in bench.stacks.values())
    code = EXIT_CODES[state]
    if code == 0 and (bench.shapes_measured < bench.total or bench.at_fault):
        code = 1
    page = Page(
        {
            "run": bench.paths.run,
            "state": state,
            "exit_code": code,
            "shapes": {"total": bench.total, "measured": bench.shapes_measured},
            "devices": devices,
            "cpu": is_on_cpu,
            "environments": bench.stacks,
            "rows": [_document_of(result, bench.family) for result in bench.results],
            "missing": missing,
            "failed": describe_failures(bench.failed),
            "files": result_files(bench.paths),
        },
        code,
    )
    add_results(page, bench.results)
    for item in missing:
        where = f" in {item['env']}" if item["env"] else ""
        page.line(f"{item['backend']}{where}: {item['status']} for {plural(item['shapes'], 'shape')}: {item['detail']}")
    with_result = {result.key for result in bench.results}
    for shape in bench.failed:
        if shape.key not in with_result:
            page.line(f"! {describe(shape.key)} failed: {shape.reason}: {shape.detail}")
    for timer in sorted({result.timer for result in bench.results} - {"", *TIMERS}):
        page.line(f"timed plainly, as in the FP4 guide ({timer}): noisier than without --iters")
    page.line(*(f"measured on {'the CPU ' if is_on_cpu else ''}{device}" for device in devices))
    page.line(_summarize(bench, state), *(f"  {path}" for path in result_files(bench.paths).values()))
    page.line(f"next: {command(_next_command(bench, state))}")
    return page


def _summarize(bench: BenchResults, state: str) -> str:
    statuses = Counter(result.status for result in bench.results)
    text = f"run {bench.paths.run} {state}: {plural(bench.total, 'shape')}, {bench.shapes_measured} with a number"
    if statuses["unstable"]:
        text += f"; {plural(statuses['unstable'], 'result')} whose runs disagree (~)"
    if statuses["short"]:
        text += f"; {statuses['short']} with fewer runs than --repeats (~)"
    return text


def _next_command(bench: BenchResults, state: str) -> str:
    if state != "finished" and bench.shapes_measured < bench.total:
        return f"resume {bench.paths.named}"
    measured = {result.env for result in bench.results}
    sides = [env for env in bench.stacks if env and env in measured]
    if len(sides) > 1:
        return f"compare {' '.join(quote(str(bench.paths.root / f'{env}.csv')) for env in sides[:2])}"
    return f"analyze {bench.paths.named}"


def add_results(page: Page, results: Sequence[BackendResult]) -> None:
    """Add TFLOPS, a row for each shape: the fastest of an environment in bold, `~` if its runs disagree."""
    columns = list(dict.fromkeys((result.env, result.backend) for result in results))
    heads = [f"{env}: {backend}" if env else backend for env, backend in columns]
    best = fastest(results)
    by_shape: dict[int, dict[tuple[str, str], BackendResult]] = {}
    for result in results:
        by_shape.setdefault(result.shape, {})[result.env, result.backend] = result
    rows: list[list[Cell]] = []
    for shape, by_column in by_shape.items():
        cells = [_cell(by_column.get((env, backend)), best.get((shape, env))) for env, backend in columns]
        winners = [winner for (number, _), winner in best.items() if number == shape]
        names = dict.fromkeys(winner.backend for winner in winners)
        speeds = ", ".join(f"{winner.bw:,.0f}" for winner in winners)
        first = next(iter(by_column.values()))
        rows.append([describe(first.key), *cells, ", ".join(names), speeds])
    page.table(
        ("shape", *heads, "fastest", "its GB/s"),
        rows,
        "shape",
        right=[*heads, "its GB/s"],
        more="all in bench.csv",
        caption="TFLOPS",
    )


def missing_results(results: Sequence[BackendResult]) -> list[dict[str, Any]]:
    """Return why backends have no result, with the number of shapes of each reason."""
    counts = Counter((r.env, r.backend, r.status, r.detail) for r in results if not r.is_measured)
    return [
        {"env": env, "backend": backend, "status": status, "shapes": n, "detail": detail}
        for (env, backend, status, detail), n in counts.items()
    ]


def _cell(result: BackendResult | None, best: BackendResult | None) -> Cell:
    if result is None:
        return ""
    if result.is_measured:
        mark = "" if result.status == "ok" else "~"
        return f"{result.tflops:.4g}{mark}", "bold" if result is best else ""
    return ("-", "dim") if result.status in HARMLESS else (result.status, "red")


def _document_of(result: BackendResult, family: Family) -> dict[str, Any]:
    key = family.named_key(result.key)
    return {**asdict(result), "key": key, "runs": [{"run": number, "us": us} for number, us in result.runs]}
