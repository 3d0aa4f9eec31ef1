"""Report at the end of a bench: the table of backends, missing results with reasons, files, exit code."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from shlex import quote
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from orchestrator.cli.output.live_view import plain
from orchestrator.cli.output.tables import MOST_ROWS, console, table
from orchestrator.command_hints import command
from orchestrator.ledger import FailedShape, LedgerReader
from orchestrator.paths import RunPaths
from orchestrator.results.bench import (
    HARMLESS,
    Result,
    environments,
    exit_fault,
    fastest,
    results,
    rule_of,
)
from orchestrator.run.config import RunConfig
from orchestrator.shapes import describe
from worker.families import Family
from worker.text import plural

if TYPE_CHECKING:
    pass

EXIT = {"finished": 0, "interrupted": 130, "cancelled": 130}


def ending(paths: RunPaths, config: RunConfig, state: str, *, json_: bool) -> int:
    """Print how a run of the tuner bench went; the exit code."""
    with LedgerReader.open_readonly(paths.ledger) as ledger:
        family, found, stacks = ledger.family, results(ledger, rule_of(config.options)), environments(ledger)
        total, failed = ledger.counts().total, ledger.failed()
    return finish(paths, family, found, stacks, state, total, failed, json_=json_)


def finish(
    paths: RunPaths,
    family: Family,
    found: Sequence[Result],
    stacks: Mapping[str, Mapping[str, Any]],
    state: str,
    total: int,
    failed: Sequence[FailedShape] = (),
    *,
    json_: bool,
) -> int:
    """Print it; 1 where a shape has no number at all, or a backend faulted or was wrong."""
    devices = sorted({str(s.get("device", "")) for s in stacks.values()} - {""})
    on_cpu = any(str(s.get("gfx", "")).startswith("cpu") for s in stacks.values())
    numbered = {r.shape for r in found if r.measured}
    code = EXIT[state] or int(len(numbered) < total or exit_fault(found))
    absent = missing(found)
    if json_:
        document = {
            "run": paths.run, "state": state, "exit_code": code,
            "shapes": {"total": total, "measured": len(numbered)}, "devices": devices, "cpu": on_cpu,
            "environments": stacks, "rows": [_row(r, family) for r in found], "missing": absent,
            "failed": [{"shape": describe(f.key), "reason": f.reason, "detail": f.detail} for f in failed],
            "files": {p.name: str(p) for p in paths.results() if p.exists()},
        }  # fmt: skip
        print(json.dumps(document, indent=1))
        return code
    if found:
        console().print(picture(found))
    for item in absent:
        where = f" in {item['env']}" if item["env"] else ""
        shapes = plural(item["shapes"], "shape")
        print(f"{item['backend']}{where}: {item['status']} for {shapes}: {plain(item['detail'], 300)}")
    known = {r.key for r in found}
    for f in failed:
        if f.key not in known:
            print(f"! {describe(f.key)} failed: {f.reason}: {plain(f.detail, 300)}")
    for device in devices:
        print(f"measured on {'the CPU ' if on_cpu else ''}{plain(device, 100)}")
    _summary(paths, family, state, total, found)
    return code


def picture(found: Sequence[Result]) -> Table:
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


def missing(found: Sequence[Result]) -> list[dict[str, Any]]:
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


def _summary(paths: RunPaths, family: Family, state: str, total: int, found: Sequence[Result]) -> None:
    with_number = len({r.shape for r in found if r.measured})
    loose = sum(r.status == "unstable" for r in found)
    short = sum(r.status == "short" for r in found)
    words = f"run {paths.run} {state}: {plural(total, 'shape')}, {with_number} with a number"
    words += f"; {plural(loose, 'result')} whose runs disagree (~)" if loose else ""
    words += f"; {short} with fewer runs than --repeats (~)" if short else ""
    print(words)
    for path in paths.results():
        if path.exists():
            print(f"  {path}")
    if state != "finished" and with_number < total:
        print(f"next: {command(f'resume {paths.named}')}")
        return
    envs = [e for e in dict.fromkeys(r.env for r in found) if e][:2]
    if len(envs) == 2:
        golden, tot = (quote(str(paths.root / f"{env}.csv")) for env in envs)
        print(f"next: {command(f'compare {golden} {tot}')}")
    else:
        print(f"next: {command(f'analyze {paths.named}')}")
