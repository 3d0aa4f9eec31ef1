"""Publish winners: tables and Triton configs as commits on a branch of a checkout, with the text of a pull request.

AITER merges all tables of a family, and a key may be there once. So a newcomer whose key a file has already edits that
row, if it is faster by more than the noise, and is left out otherwise. New rows go into the model's own table.
"""

from __future__ import annotations

import csv
import io
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, get_args

from orchestrator.errors import InputError
from orchestrator.families import ELEMENT_TYPES, PadLevel, family_type, grid_point
from orchestrator.tables.check import VERDICTS, Build, check, verdict_of
from orchestrator.tables.checkout import CHECKS, COMMANDS, Checkout, judged, run_check, run_verify
from orchestrator.tables.export import model_names
from orchestrator.tables.kinds import Facts
from orchestrator.tables.locate import family_of, open_sources, provenance_of
from orchestrator.tables.merge import csv_line, line_of
from orchestrator.tables.policy import Action, Incumbent, Judged, Newcomer, NewcomerPool, incumbent
from orchestrator.tables.rules import REBUILD, RowRules
from orchestrator.tables.textfiles import csv_text, write_atomic, write_csv
from orchestrator.tables.tuned import Key, Place, Table, best, file_order, read_table
from orchestrator.templating import render
from worker.families import Family
from worker.text import plural
from worker.tuners.catalog import recorded_tuner

MODELS = "aiter/configs/model_configs"
NAME = "this branch"


@dataclass(frozen=True, slots=True)
class ConfigPart:
    """A run's winners as config files of a checkout. `texts` and `buckets`: by file below it; `won`: the winners."""

    texts: Mapping[str, str]
    buckets: Mapping[str, int]
    won: Sequence[Any]
    notes: Sequence[str]


@dataclass(slots=True)
class Part:
    """The rows of one family. `tuned`, `shapes`: its files below the checkout; `texts`: those that change; `misses`:
    lookups without a row before and after; `script`: AITER's own tuner with its flags."""

    family: Family
    rows: list[Judged]
    rejected: list[str]
    tuned: str
    shapes: str
    script: str = ""
    misses: tuple[int, int] = (0, 0)
    texts: dict[str, str] = field(default_factory=dict)
    facts: list[Mapping[str, Any]] = field(default_factory=list)

    def of(self, *actions: Action) -> list[Judged]:
        """The rows with one of these outcomes: added, edited, kept, refused."""
        return [r for r in self.rows if r.action in actions]

    @property
    def written(self) -> list[Judged]:
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
        return dict(Counter(r.action for r in self.written if (r.old.file if r.old else self.tuned) == file))


@dataclass(slots=True)
class Published:
    """A branch. `files`: rows of each file by outcome; `ok`: no check found what the base has not; `missing`: facts
    that a review needs and that no record has; `text`: the pull request's."""

    branch: str
    base: str
    text: Path
    title: str = ""
    commit: str = ""
    parts: list[Part] = field(default_factory=list)
    won: list[Any] = field(default_factory=list)
    files: dict[str, dict[str, int]] = field(default_factory=dict)
    checks: list[tuple[str, str, Sequence[str]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ok: bool = True
    missing: list[str] = field(default_factory=list)

    def note(self, name: str, result: tuple[bool, str], tail: Sequence[str] = ()) -> None:
        """Add a check's result, and its last lines."""
        self.checks.append((name, result[1], tail))
        self.ok = self.ok and result[0]


def publish(
    sources: Sequence[Path],
    onto: Path,
    model: str,
    folder: Path,
    run_facts: Callable[[Path], Facts],
    configs: Callable[[Path, Path], ConfigPart],
    *,
    base: str = "HEAD",
    branch: str = "",
    refresh: bool = False,
    family: str | None = None,
    title: str = "",
    e2e: str = "",
    python: str = "",
    runs: Path = Path("runs"),
    verify: Sequence[str] | None = None,
    argv: Sequence[str] = (),
) -> Published:
    """Make the branch of a checkout, its checks and, in `folder`, its text. Raises InputError; then no branch was made
    or moved.

    `sources`: run folders and tables. `run_facts`: as of `open_sources`. `configs`: merges the config files of a run
    into a checkout. `python`: what runs AITER's checks ("": not run). `runs`: where the runs of a table's records lie.
    `verify`: the words that name nodes to `verify`, None: not run. `argv`: the command line.
    """
    checkout = Checkout(onto)
    base = checkout.commit_of(base)
    families, config_runs = _by_family(sources, family)
    branch = branch or default_branch(sources, model, family)
    checkout.refuse(branch, base, refresh=refresh)
    folder.mkdir(parents=True, exist_ok=True)
    out = Published(branch, base, folder / "pull-request.md")
    jit, logs, checks = onto.absolute() / "aiter" / "jit", folder / "checks", CHECKS if python else ()
    with checkout.worktree(base) as tree:
        before = [run_check(tree, name, python, jit, logs / f"{name}.base.log") for name in checks]
        out.parts = [part_of(tree, f, paths, model, run_facts) for f, paths in families.items()]
        own, others = _texts(out, [configs(run, tree) for run in config_runs])
        out.title = title_of(title, model, out.parts, out.won)
        for texts, more in ((own, ""), (others, ": rows that other files own")):
            out.commit = checkout.commit(tree, texts, out.title + more) if texts else out.commit
        for part in out.parts:
            if part.tuned in part.texts:
                out.note(f"`db check --build` of gemmfleet, {part.family.name}", against_build(tree, part))
        for name, was in zip(checks, before, strict=True):
            now = run_check(tree, name, python, jit, logs / f"{name}.branch.log")
            out.note(f"`{name}`", judged(was, now), () if now.why else now.tail)
    for part in out.parts if verify is not None else ():
        table = folder / part.family.tuned_csv
        rows = [[r.new.cells.get(n, "") for n in part.family.tuned_header] for r in part.written]
        write_csv(table, part.family.aiter_header, rows)
        log = logs / f"run_config.{part.family.name}.log"
        out.note(f"`--run_config`, {part.family.name}", run_verify(verify or (), table, log))
    facts, commands = _evidence(out, [p for p in sources if p.is_dir()], runs)
    commands += [f"gemmfleet {shlex.join(map(str, argv))}"] if argv else []
    values = {"out": out, "model": model, "e2e": e2e, "facts": facts, "commands": [*commands, *COMMANDS]}
    write_atomic(out.text, render("pull-request.md.j2", values))
    checkout.point(branch, out.commit)
    return out


def default_branch(sources: Sequence[Path], model: str, family: str | None) -> str:
    """`gemmfleet/MODEL-FAMILIES`: the branch of these sources where none is named."""
    families, config_runs = _by_family(sources, family)
    names = [f.name for f in families]
    if config_runs:
        names.append("triton-configs")
    return f"gemmfleet/{model}-{'-'.join(names)}"


def _by_family(sources: Sequence[Path], wanted: str | None) -> tuple[dict[Family, list[Path]], list[Path]]:
    """(tables and runs by family, runs whose winners are config files)."""
    families: dict[Family, list[Path]] = {}
    config_runs = []
    for path in dict.fromkeys(sources):
        if path.is_dir() and recorded_tuner(str(provenance_of(path).get("tuner") or "")).produces == "configs":
            config_runs.append(path)
        else:
            families.setdefault(family_of(path / "tuned.csv" if path.is_dir() else path, wanted), []).append(path)
    return families, config_runs


def _texts(out: Published, configs: Sequence[ConfigPart]) -> tuple[dict[str, str], dict[str, str]]:
    """The texts of the model's own files and of config files, and those of others with edited rows; noted in `out`."""
    own, others = dict[str, str](), dict[str, str]()
    for part in out.parts:
        for name, text in part.texts.items():
            (own if name in (part.tuned, part.shapes) else others)[name] = text
            out.files[name] = part.counts(name) or {"shapes": len(part.rows)}
    for merged in configs:
        out.won += merged.won
        out.notes += merged.notes
        own |= merged.texts
        out.files |= {name: {"buckets": n} for name, n in merged.buckets.items()}
    if not own and not others:
        rows = [f"{r.new.place}: {r.action}: {r.why}" for p in out.parts for r in p.rows]
        rows += [text for p in out.parts for text in p.rejected] + out.notes
        raise InputError([f"nothing to publish onto {out.base[:12]}", *(f"  {row}" for row in rows[:20])])
    return own, others


def part_of(tree: Path, family: Family, paths: Sequence[Path], model: str, run_facts: Callable[[Path], Facts]) -> Part:
    """The part of a family's runs and tables. Raises InputError for sources that cannot be used."""
    build, sources = Build(tree, NAME), open_sources(paths, [], None, family.name, run_facts)
    tables = {str(p.relative_to(tree)): read_table(p, family, lenient=True) for p in build.tables(family)}
    every = ((file, row) for file, table in tables.items() for row in table.rows)
    owners = best(every, lambda e: e[1].place, lambda e: e[1].us or float("inf"))
    there = {row.key for table in tables.values() for row in table.rows}

    def old(place: Place) -> Incumbent | None:
        file, row = owners.get(place, ("", None))
        return incumbent(tables[file].cells(row), row.us, family.name, file, row.line) if row else None

    pool = NewcomerPool(family, old, family.aiter.err_ratio)
    pool.take(sources.newcomers())
    pool.take(sources.beside(), beside=True)
    header = build.header(family)
    if not (header and build.start(family).one_header) and not set(family.chip_columns) <= set(header):
        header = family.tuned_header  # the tree's own table is older than gfx, and others may stand beside it
    rows = list(settle(pool, RowRules(family, header, family.aiter.err_ratio, build)))
    tuned, shapes = (f"{MODELS}/{n}" for n in model_names(
        model, family, None, (r.new.cells for r in rows)
    ))  # fmt: skip
    rejected = [f"{', '.join(map(str, r.key.values()))}: {r.why}" for r in pool.rejected]
    out = Part(family, rows, rejected, tuned, shapes)
    if family.name in build.tree.scripts:
        out.script = " ".join((str(build.tree.scripts[family.name].relative_to(tree)), *family.aiter.flags))
    added, keys = [r.new for r in out.of("added")], [r.new.key for r in rows]
    out.misses = misses(keys, there, family), misses(keys, there | {new.key for new in added}, family)
    out.facts = [sources.facts(r.new) for r in out.written]
    parts = {file: _lines(table) for file, table in tables.items()}
    for new, edited in ((r.new, r.old) for r in out.of("edited") if r.old):
        line = csv_line(_edit(edited, new, family), tables[edited.file].header)
        parts[edited.file][owners[new.place][1].part] = line
        out.texts[edited.file] = "".join(parts[edited.file])
    if added:
        table = tables.get(tuned)
        if table is None and (tree / tuned).exists():  # an AITER that does not merge model_configs
            table = read_table(tree / tuned, family, lenient=True)
        lines = parts.get(tuned) or (_lines(table) if table else [csv_text(family.to_aiter(header))])
        out.texts[tuned] = with_rows(lines, table, table.header if table else header, added, family)
        listed = build.header(family, untuned=True) or family.key_names
        text = (tree / shapes).read_text() if (tree / shapes).exists() else ""
        out.texts[shapes] = untuned(text, listed, keys, family)
    return out


def settle(pool: NewcomerPool, rules: RowRules) -> Iterator[Judged]:
    """The outcome of every champion, in the order of the keys. `rules` are those of the build that gets the rows."""
    for new in pool.champions():
        found, cells = pool.judge(new), [new.cells.get(n, "") for n in rules.header]
        broken = list(rules(cells, new.key))
        action: Action = "edited" if found.action == "replaced" else found.action
        why = "; ".join(text for _, level, text in broken if level == "error")
        if why:
            action = "refused"
        elif pool.is_incumbent(new):
            action, why = "kept", "its kernel is the row's already"
        elif found.old and found.judged == "no old time":
            action, why = "kept", f"{found.old.file}:{found.old.line} has the key, and no time to compare with"
        yield replace(found, action=action, why=why or found.why, rebuild=any(b[0] == REBUILD for b in broken))


def misses(keys: Iterable[Key], there: set[Key], family: Family) -> int:
    """Number of keys for which AITER's lookup finds no row: neither the exact M nor its two paddings."""
    padded = [(key, *((*key[:2], *grid_point(key[2:], family, level)) for level in get_args(PadLevel))) for key in keys]
    return sum(there.isdisjoint(tried) for tried in padded)


def with_rows(
    parts: Sequence[str], table: Table | None, header: Sequence[str], rows: Iterable[Newcomer], family: Family
) -> str:
    """A table's text with further rows, all in AITER's order. `parts`: its records, the header first; `table`: as read,
    None for a new file."""
    there, order = table.rows if table else (), file_order(family, header)
    kept = [(order(row.key), parts[row.part]) for row in there]
    kept += [(order(new.key), line_of(header, new, family)) for new in rows]
    numbers = {0, *(row.part for row in there)}
    keyless = [part for n, part in enumerate(parts) if n not in numbers and part.strip()]
    return "".join([parts[0], *(line for _, line in sorted(kept, key=itemgetter(0))), *keyless])


def untuned(text: str, header: Sequence[str], keys: Iterable[Key], family: Family) -> str:
    """The list of shapes beside a table: a new one in order (`text` ""), or one with the missing shapes below."""
    names = ("gfx", "cu_num", *family.key_names)
    ordered = sorted(keys, key=file_order(family, header))
    shapes = dict.fromkeys(tuple(str(key[names.index(n)]) for n in header) for key in ordered)
    records = list(csv.reader(io.StringIO(text)))
    own = family.from_aiter(c.strip() for c in records[0]) if records else tuple(header)
    listed = (dict(zip(own, (c.strip() for c in r), strict=False)) for r in records[1:])
    have = {tuple(cells.get(n, "") for n in header) for cells in listed}
    lines = [line.rstrip("\r") + "\n" for line in text.rstrip("\r\n").split("\n")] if text else []
    new = (csv_line(dict(zip(header, shape, strict=True)), own) for shape in shapes if shape not in have)
    return "".join([*(lines or [csv_text(family.to_aiter(header))]), *new])


def _lines(table: Table) -> list[str]:
    """The records of a table, with LF line ends."""
    return [part.rstrip("\r\n") + "\n" for part in table.parts]


def _edit(old: Incumbent, new: Newcomer, family: Family) -> dict[str, str]:
    """The cells of a row with the newcomer's results; its key stays as it is spelled."""
    fixed = {"gfx", "cu_num", "_tag", *family.key_names}
    return {n: new.cells[n] if n in new.cells and n not in fixed else cell for n, cell in old.cells.items()}


def against_build(tree: Path, part: Part) -> tuple[bool, str]:
    """(True where a tree that has the part's table would serve it safely, a sentence on it)."""
    found, faults = check([tree / part.tuned], part.family.name, part.family.aiter.err_ratio, Build(tree, NAME))
    problems = [f"{p['line']}: {p['text']}" for c in found for p in c.problems() if p["level"] == "error"] + faults
    words = f"{VERDICTS[verdict_of(found)]} {NAME}, over all tables that it merges"
    return not problems, "; ".join([words, *problems[:5]])


def _evidence(out: Published, folders: Sequence[Path], runs: Path) -> tuple[dict[str, str], list[str]]:
    """(facts of the measurements by name, the commands that repeat them). Missing facts are noted in `out`."""
    known = [f for p in out.parts for f in p.facts]
    documents = {str(f["run"]): runs / str(f["run"]) for f in known if f.get("run")} | {p.name: p for p in folders}
    found = {run: provenance_of(folder) for run, folder in documents.items()}
    known += [f for document in found.values() if out.won for f in _of_slots(document)]
    facts, out.missing = summary(known)
    out.missing += [f"command of the run {run}" for run, document in found.items() if not document.get("argv")]
    return facts, [f"gemmfleet {shlex.join(map(str, d['argv']))}" for d in found.values() if d.get("argv")]


def _of_slots(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Facts of a run that wrote config files: those of its slots."""
    out = []
    for slot in document.get("devices") or []:
        device, node = slot.get("device") or {}, slot.get("node")
        versions = {**device, **(device.get("versions") or {}), **{n: document.get(n) for n in ("run", "tuner")}}
        versions.setdefault("rocm", versions.get("hip"))
        image, commit = (document.get("images") or {}).get(node), (device.get("aiter") or {}).get("commit")
        out.append({**versions, "node": node, "image": image, "aiter_commit": commit})
    return out


FACTS: Mapping[str, str] = {
    "device": "GPU", "rocm": "ROCm", "aiter_commit": "AITER commit when measured", "image": "image digest",
    "tuner": "tuner", "node": "node", "run": "run",
}  # fmt: skip
"""Fields of a row's record, and their names in the text."""
NEEDED = ("device", "rocm", "aiter_commit", "run")
UNKNOWN = "not recorded"
_TYPE_WORD = re.compile(r"(?<![a-z0-9])(?:mx)?(?:fp|bf|int)\d+(?![0-9])", re.I)


def types_of(family: Family, rows: Iterable[Judged]) -> set[str]:
    """The data types of rows as people call them, by their own columns, else by the family."""
    columns = [c for c in ("q_dtype_a", "q_dtype_w", "dtype") if c in family.key_names][:2]
    if not columns:
        return {(family_type(family) or ("fp8",))[0]}
    names = {r.new.cells.get(c, "") for r in rows for c in columns}
    return {ELEMENT_TYPES[n][0] if n in ELEMENT_TYPES else n.removeprefix("torch.") for n in names}


def title_of(wanted: str, model: str, parts: Sequence[Part], won: Sequence[Any]) -> str:
    """The title, checked where the user gave one. Raises InputError where that names data types of no row."""
    types = {t for p in parts for t in types_of(p.family, p.written)}
    named = {word.lower().removeprefix("mx") for word in _TYPE_WORD.findall(wanted)}
    if not won and (wrong := named - types):
        raise InputError(f"--title names {', '.join(sorted(wrong))}, and the rows are of {', '.join(sorted(types))}")
    chips = sorted({str(r.new.key[0]) for p in parts for r in p.written} | {w.place.device.name for w in won})
    what = [f"{p.family.name} ({', '.join(sorted(types_of(p.family, p.written)))})" for p in parts if p.written]
    what += sorted({f"Triton {w.place.kind.config}" for w in won})
    tags = "[Triton/Gluon] [Config]" if won else "[Config]"
    return wanted or f"{tags} Tune {model} {' and '.join(what)} GEMMs for {', '.join(chips)}"


def summary(facts: Sequence[Mapping[str, Any]]) -> tuple[dict[str, str], list[str]]:
    """(what rows were measured with, by its name; the names of what a review needs and some row has no record of)."""
    out, missing = dict[str, str](), list[str]()
    for fact, name in FACTS.items():
        values = Counter(str(f.get(fact) or UNKNOWN) for f in facts)
        out[name] = "; ".join(f"{v} ({plural(n, 'row')})" if len(values) > 1 else v for v, n in values.most_common())
        missing += [name] if fact in NEEDED and (UNKNOWN in values or not values) else []
    clocks = [c for f in facts for c in (f.get("clocks") or {}).values()]
    for fact, name in (("clock_mhz", "GPU clock (MHz)"), ("memory_clock_mhz", "memory clock (MHz)")):
        numbers = [c[fact] for c in clocks if c.get(fact)]
        out[name] = f"{min(numbers):g} to {max(numbers):g}" if numbers else UNKNOWN
    for fact, name in (("tried", "candidates tried"), ("failed", "of them without a right result")):
        counts = [f[fact] for f in facts if f.get(fact) is not None]
        out[name] = f"{sum(counts):,}" if counts else UNKNOWN
    return out, missing
