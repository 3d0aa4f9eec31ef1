"""The document of a comparison for people: tables for a terminal, Markdown and CSV."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from typing import Any

from orchestrator.analysis.compare.document import percent
from orchestrator.analysis.compare.statistics import AGAIN_BOUND, OPEN
from orchestrator.analysis.grid import Grid, marked, safe
from orchestrator.command_hints import command
from orchestrator.tables.write import cell, no_formula, write_csv
from worker.text import plural

MOST_ROWS = 60
MEANS = {"machine": "another machine", "method": "measured differently", "other": "differs too", "test": "under test"}
HEADS = ("golden us", "tot us", "change", "verdict", "p", "seen from", "golden runs", "tot runs")


def environments(of: dict[str, Any]) -> Grid:
    """The fields of the environment records that differ, and what that means."""
    found = [d for d in of["environment"]["differences"] if d["kind"] in MEANS]
    rows = [(d["field"], d["golden"], d["tot"], MEANS[d["kind"]]) for d in found]
    return Grid(("environment", "golden", "tot", ""), rows, ("environment", "golden", "tot", ""))


def table(of: dict[str, Any]) -> Grid:
    """The first rows, and all that regressed or could not be judged."""
    told = [r for i, r in enumerate(of["rows"]) if i < MOST_ROWS or r["verdict"] in ("regression", *OPEN)]
    heads = [*of["rows"][0]["key"], *HEADS]
    cells = [
        (*r["key"].values(), *("" if x is None else f"{x:.2f}" for x in (r["golden_us"], r["tot_us"])),
         percent(r["change"], sign=True), r["verdict"], "" if r["p"] is None else f"{r['p']:.2g}",
         percent(r["seen_from"], sign=True), r["golden_repeats"], r["tot_repeats"])
        for r in told
    ]  # fmt: skip
    verdict = len(heads) - len(HEADS) + HEADS.index("verdict")
    bold = [verdict if r["verdict"] == "regression" else None for r in told]
    return Grid(heads, cells, ("kernel", "verdict"), bold)


def sentences(of: dict[str, Any], listed: str) -> list[str]:
    """The verdict in sentences, and the command that measures what could not be judged; `listed`: see `--again`."""
    out = list(of["summary"])
    if left := len(of["rows"]) - len(table(of).rows):
        out.insert(0, f"... and {plural(left, 'more row')} (all with --out or --json)")
    if of["open"]:
        sides = " ".join(f"--{name} {quote(f)}" for name, files in of["files"].items() for f in files)
        again = of["again"].replace("again.csv", quote(listed or "again.csv"), 1)
        first = "" if listed else command(f"compare {sides} --again again.csv") + "; "
        out.append(f"{plural(of['open'], 'row')} could not be judged. Measure again, in turn and seven times, and"
                   f" compare the new files with --bound {AGAIN_BOUND:g}:")  # fmt: skip
        out.append(f"  {first}{again}")
    return out


def markdown(of: dict[str, Any]) -> Iterator[str]:
    """Lines of Markdown for a pull request."""
    head = {0: "No regression", 1: "Regression", 4: "Not all could be judged"}[of["exit_code"]]
    yield from (f"### {head}: golden against tot", "")
    yield from (f"- {safe(line.strip())}" for line in (*sentences(of, ""), *of["warnings"]))
    yield from marked(environments(of))
    yield from marked(table(of))


def write_rows(of: dict[str, Any], path: Path) -> None:
    """Writes all rows as CSV, the worst first. Raises OSError."""
    keys, *figures = of["rows"][0]
    rows = ([*r[keys].values(), *(r[n] for n in figures)] for r in of["rows"])
    cells = ([no_formula(v) if isinstance(v, str) else cell(v) for v in row] for row in rows)
    write_csv(path, [*of["rows"][0][keys], *figures], cells)


def write_again(of: dict[str, Any], path: Path) -> None:
    """Writes the kernels and shapes that could not be judged, for a benchmark. Raises OSError."""
    rows = [map(no_formula, r["key"].values()) for r in of["rows"] if r["verdict"] in OPEN]
    write_csv(path, list(of["rows"][0]["key"]), rows)
