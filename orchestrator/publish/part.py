"""One family of a publication: its rows settled against a tree's tables, and the texts of its files."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.publish.rows import Outcome, Owner, Settled, misses, settle
from orchestrator.results.aiter_compatibility import model_names, usual_form
from orchestrator.tables.tuned import Key, Place, Table, TableRow, file_order, key_dict, read_shipped
from orchestrator.tuned_db.aiter_build import Build
from orchestrator.tuned_db.check import check, verdict_of
from orchestrator.tuned_db.check_build import VERDICTS, BuildCheck
from orchestrator.tuned_db.merge_policy import Newcomer, NewcomerPool, identity
from orchestrator.tuned_db.rules import RowRules
from orchestrator.tuned_db.sources import open_sources
from worker.families import Family

Cells = Mapping[str, str]


def line_of(header: Sequence[str], cells: Cells) -> str:
    """A row as a line."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow([cells.get(n, "") for n in header])
    return out.getvalue()


def edited(text: str, header: Sequence[str], edits: Mapping[int, Cells]) -> str:
    """A table's text with some lines (from 1) replaced; every other line stays, but for its end."""
    lines = _lines(text)
    for n, cells in edits.items():
        lines[n - 1] = line_of(header, cells)
    return "".join(lines)


def with_rows(
    text: str, table: Table | None, header: Sequence[str], rows: Iterable[tuple[Key, Cells]], family: Family
) -> str:
    """A table's text with further rows, all in AITER's order. `table`: `text` as read, None for a new file, which gets
    `header`."""
    lines = _lines(text) or [_head(family.to_aiter(header))]
    columns, there = (table.header, table.rows) if table else (header, ())
    kept = [(file_order(row.key, family), lines[row.line - 1]) for row in there]
    for key, cells in rows:
        named = {n: str(v) for n, v in key_dict(key, family).items()}
        kept.append((file_order(key, family), line_of(columns, {**cells, **named})))
    numbers = {1, *(row.line for row in there)}
    keyless = [line for n, line in enumerate(lines, 1) if n not in numbers and line.strip()]
    return "".join([lines[0], *(line for _, line in sorted(kept)), *keyless])


def untuned(text: str, header: Sequence[str], keys: Iterable[Key], family: Family) -> str:
    """The list of shapes beside a table: a new one in order (`text` ""), or one with the missing shapes below."""
    names = ("gfx", "cu_num", *family.key_names)
    ordered = sorted(keys, key=lambda key: file_order(key, family))
    shapes = dict.fromkeys(tuple(str(key[names.index(n)]) for n in header) for key in ordered)
    records = list(csv.reader(io.StringIO(text)))
    own = family.from_aiter(c.strip() for c in records[0]) if records else tuple(header)
    listed = (dict(zip(own, (c.strip() for c in r), strict=False)) for r in records[1:])
    have = {tuple(cells.get(n, "") for n in header) for cells in listed}
    new = [dict(zip(header, shape, strict=True)) for shape in shapes if shape not in have]
    return (edited(text, own, {}) or _head(family.to_aiter(header))) + "".join(line_of(own, cells) for cells in new)


def _lines(text: str) -> list[str]:
    return [line.rstrip("\r") + "\n" for line in text.rstrip("\r\n").split("\n")] if text else []


def _head(header: Sequence[str]) -> str:
    return line_of(header, {n: n for n in header})


MODELS = "aiter/configs/model_configs"
NAME = "this branch"


@dataclass(slots=True)
class Part:
    """The rows of one family. `tuned`, `shapes`: its files below the checkout; `texts`: those that change; `misses`:
    lookups without a row before and after; `script`: AITER's own tuner with its flags."""

    family: Family
    rows: list[Settled]
    rejected: list[str]
    tuned: str
    shapes: str
    script: str = ""
    misses: tuple[int, int] = (0, 0)
    texts: dict[str, str] = field(default_factory=dict)
    facts: list[Mapping[str, Any]] = field(default_factory=list)

    def of(self, *outcomes: Outcome) -> list[Settled]:
        """The rows with one of these outcomes."""
        return [r for r in self.rows if r.outcome in outcomes]

    @property
    def written(self) -> list[Settled]:
        """The rows that are published."""
        return self.of("added", "edited")

    @property
    def chips(self) -> list[str]:
        """The chips of the rows that are published, with their compute units."""
        return sorted(
            {f"{gfx} with CU count {cu}" if cu else str(gfx) for gfx, cu in (r.new.key[:2] for r in self.written)}
        )

    def counts(self, file: str) -> dict[str, int]:
        """Number of rows that are written into a file, by outcome."""
        return dict(Counter(r.outcome for r in self.written if (r.owner.file if r.owner else self.tuned) == file))


def part_of(tree: Path, family: Family, paths: Sequence[Path], model: str) -> Part:
    """The part of a family's runs and tables. Raises InputError for sources that cannot be used."""
    build, sources = Build(tree, NAME), open_sources(paths, [], None, family.name)
    owners, there = _owners(build, family)
    incumbent = {place: identity(owner.cells, family.name) for place, owner in owners.items()}.get
    pool = NewcomerPool(family, incumbent, family.aiter.err_ratio)
    pool.take(sources.newcomers())
    pool.take(sources.beside(), beside=True)
    header = build.header(family)
    if not (header and build.start(family).one_header) and not set(family.chip_columns) <= set(header):
        header = family.tuned_header  # the tree's own table is older than gfx, and others may stand beside it
    rows = settle(pool, owners, _held(build, family, header))
    tuned, shapes = model_names(model, family, usual_form(family), (r.new.cells for r in rows))
    rejected = [f"{', '.join(map(str, r.key.values()))}: {r.why}" for r in pool.rejected]
    out = Part(family, rows, rejected, f"{MODELS}/{tuned}", f"{MODELS}/{shapes}")
    if family.name in build.tree.scripts:
        out.script = " ".join((str(build.tree.scripts[family.name].relative_to(tree)), *family.aiter.flags))
    added, keys = [(r.new.key, r.new.cells) for r in out.of("added")], [r.new.key for r in rows]
    out.misses = misses(keys, there, family), misses(keys, there | {key for key, _ in added}, family)
    out.facts = [sources.facts(r.new) for r in out.written]
    edits: dict[str, dict[int, dict[str, str]]] = {}
    for owner, new in ((r.owner, r.new) for r in out.of("edited") if r.owner):
        edits.setdefault(owner.file, {})[owner.line] = _edit(owner, new, family)
    for file, lines in edits.items():
        out.texts[file] = edited((tree / file).read_text(), read_shipped(tree / file, family).header, lines)
    if added:
        text = out.texts.get(out.tuned) or _text(tree / out.tuned)
        table = read_shipped(tree / out.tuned, family) if text else None
        out.texts[out.tuned] = with_rows(text, table, header, added, family)
        listed = build.header(family, untuned=True) or family.key_names
        out.texts[out.shapes] = untuned(_text(tree / out.shapes), listed, keys, family)
    return out


def against_build(tree: Path, part: Part) -> tuple[bool, str]:
    """(True where a tree that has the part's table would serve it safely, a sentence on it)."""
    found, faults = check([tree / part.tuned], part.family.name, part.family.aiter.err_ratio, Build(tree, NAME))
    problems = [f"{p['line']}: {p['text']}" for c in found for p in c.problems() if p["level"] == "error"] + faults
    words = f"{VERDICTS[verdict_of(found)]} {NAME}, over all tables that it merges"
    return not problems, "; ".join([words, *problems[:5]])


def _owners(build: Build, family: Family) -> tuple[dict[Place, Owner], set[Key]]:
    """(the row that owns each place, the fastest where a tree has several; all keys)."""
    owners: dict[Place, Owner] = {}
    keys: set[Key] = set()
    for path in build.tables(family):
        table, file = read_shipped(path, family), str(path.relative_to(build.tree.root))
        for row in table.rows:
            keys.add(row.key)
            us, old = row.us if row.us and row.us > 0 else None, owners.get(row.place)
            if old is None or (us or float("inf")) < (old.us or float("inf")):
                owners[row.place] = Owner(file, row.line, table.cells(row), us)
    return owners, keys


def _held(build: Build, family: Family, header: tuple[str, ...]) -> Callable[[Newcomer], tuple[str, bool]]:
    """The judgement of a build on a row, as `settle` takes it."""
    rules, by_build = RowRules(family, header, family.aiter.err_ratio), BuildCheck(build, [])

    def held(new: Newcomer) -> tuple[str, bool]:
        cells = tuple(new.cells.get(n, "") for n in header)
        standing, found = by_build.rows(header, [TableRow(0, 0, cells, new.key, new.tag, new.us, new.place)], family)
        broken = [*map(by_build.held, rules(cells)), *(b for _, b in found)]
        return "; ".join(text for _, level, text in broken if level == "error"), "rebuild" in standing

    return held


def _edit(owner: Owner, new: Newcomer, family: Family) -> dict[str, str]:
    """The cells of an owner's row with the newcomer's results; its key stays as it is spelled."""
    fixed = {"gfx", "cu_num", "_tag", *family.key_names}
    return {n: new.cells[n] if n in new.cells and n not in fixed else old for n, old in owner.cells.items()}


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
