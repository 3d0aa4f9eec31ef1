"""Publish winners: tables and Triton configs as commits on a branch of a checkout, with the text of a pull request."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.configs.merge import merge as merge_configs
from orchestrator.configs.winners import WonFile, read_winners
from orchestrator.errors import InputError
from orchestrator.publish.checkout import Checkout
from orchestrator.publish.checks import CHECKS, COMMANDS, CheckRun, judged, run_check, run_verify
from orchestrator.publish.part import Part, against_build, part_of
from orchestrator.publish.rows import Settled
from orchestrator.shapes.model import ELEMENT_TYPES, family_type
from orchestrator.tables.locate import family_of, provenance_of
from orchestrator.tables.write import write_csv
from orchestrator.templating import render
from orchestrator.userfiles import write_atomic
from worker.families import Family
from worker.text import plural
from worker.tuners.catalog import recorded_tuner


@dataclass(frozen=True, slots=True)
class Request:
    """A request to publish.

    `sources`: run folders and tables. `python`: what runs AITER's checks ("": not run). `runs`: where the runs of a
    table's records lie. `verify`: the words that name nodes to `verify`, None: not run. `argv`: the command line.
    """

    sources: Sequence[Path]
    checkout: Path
    model: str
    out: Path
    base: str = "HEAD"
    branch: str = ""
    refresh: bool = False
    family: str | None = None
    title: str = ""
    e2e: str = ""
    python: str = ""
    runs: Path = Path("runs")
    verify: Sequence[str] | None = None
    argv: Sequence[str] = ()


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
    won: list[WonFile] = field(default_factory=list)
    files: dict[str, dict[str, int]] = field(default_factory=dict)
    checks: list[tuple[str, str, Sequence[str]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ok: bool = True
    missing: list[str] = field(default_factory=list)

    def note(self, name: str, result: tuple[bool, str], tail: Sequence[str] = ()) -> None:
        """Add a check's result, and its last lines."""
        self.checks.append((name, result[1], tail))
        self.ok = self.ok and result[0]


def publish(request: Request) -> Published:
    """Make the branch, its checks and its text. Raises InputError; then no branch was made or moved."""
    checkout = Checkout(request.checkout)
    base = checkout.commit_of(request.base)
    families, config_runs = _by_family(request)
    names = [*(f.name for f in families), *(["triton-configs"] if config_runs else [])]
    branch = request.branch or f"gemmfleet/{request.model}-{'-'.join(names)}"
    checkout.refuse(branch, base, refresh=request.refresh)
    request.out.mkdir(parents=True, exist_ok=True)
    out = Published(branch, base, request.out / "pull-request.md")
    with checkout.worktree(base) as tree:
        before = _checks(request, tree, "base")
        own, others = _texts(request, tree, families, config_runs, out)
        out.title = title_of(request.title, request.model, out.parts, out.won)
        for texts, more in ((own, ""), (others, ": rows that other files own")):
            out.commit = checkout.commit(tree, texts, out.title + more) if texts else out.commit
        for part in out.parts:
            if part.tuned in part.texts:
                out.note(f"`db check --build` of gemmfleet, {part.family.name}", against_build(tree, part))
        for name, was, now in zip(CHECKS, before, _checks(request, tree, "branch"), strict=False):
            out.note(f"`{name}`", judged(was, now), () if now.why else now.tail)
    for part in out.parts if request.verify is not None else ():
        table = request.out / part.family.tuned_csv
        rows = [[r.new.cells.get(n, "") for n in part.family.tuned_header] for r in part.written]
        write_csv(table, part.family.aiter_header, rows)
        log = request.out / "checks" / f"run_config.{part.family.name}.log"
        out.note(f"`--run_config`, {part.family.name}", run_verify(request.verify or (), table, log))
    facts, commands = _evidence(request, out)
    values = {"out": out, "request": request, "facts": facts, "commands": [*commands, *COMMANDS]}
    write_atomic(out.text, render("pull-request.md.j2", values))
    checkout.point(branch, out.commit)
    return out


def _by_family(request: Request) -> tuple[dict[Family, list[Path]], list[Path]]:
    """(tables and runs by family, runs whose winners are config files)."""
    families: dict[Family, list[Path]] = {}
    config_runs = []
    for path in dict.fromkeys(request.sources):
        if path.is_dir() and recorded_tuner(str(provenance_of(path).get("tuner") or "")).produces == "configs":
            config_runs.append(path)
        else:
            family = family_of(path / "tuned.csv" if path.is_dir() else path, request.family)
            families.setdefault(family, []).append(path)
    return families, config_runs


def _checks(request: Request, tree: Path, word: str) -> list[CheckRun]:
    jit, logs = request.checkout.absolute() / "aiter" / "jit", request.out / "checks"
    names = CHECKS if request.python else ()
    return [run_check(tree, name, request.python, jit, logs / f"{name}.{word}.log") for name in names]


def _texts(
    request: Request, tree: Path, families: Mapping[Family, Sequence[Path]], config_runs: Sequence[Path], out: Published
) -> tuple[dict[str, str], dict[str, str]]:
    """The texts of the model's own files and of config files, and those of others with edited rows; noted in `out`."""
    own, others = dict[str, str](), dict[str, str]()
    for family, paths in families.items():
        part = part_of(tree, family, paths, request.model)
        out.parts.append(part)
        for name, text in part.texts.items():
            (own if name in (part.tuned, part.shapes) else others)[name] = text
            out.files[name] = part.counts(name) or {"shapes": len(part.rows)}
    for run in config_runs:
        out.won += read_winners(run)
        merged = merge_configs(run, tree)
        out.notes += [*merged.notes, *([f"config files: proven by {merged.proof}"] if merged.proof else [])]
        for change in merged.changes:
            name = str(change.path.relative_to(tree))
            own[name], out.files[name] = change.after, {"buckets": len(change.buckets)}
    if not own and not others:
        rows = [f"{r.new.place}: {r.outcome}: {r.why}" for p in out.parts for r in p.rows]
        rows += [text for p in out.parts for text in p.rejected] + out.notes
        raise InputError([f"nothing to publish onto {out.base[:12]}", *(f"  {row}" for row in rows[:20])])
    return own, others


def _evidence(request: Request, out: Published) -> tuple[dict[str, str], list[str]]:
    """(what the rows were measured with, the commands that repeat it); what is missing is noted in `out`."""
    known = [f for p in out.parts for f in p.facts]
    runs = {str(f["run"]): request.runs / str(f["run"]) for f in known if f.get("run")}
    runs |= {p.name: p for p in request.sources if p.is_dir()}
    documents = {run: provenance_of(folder) for run, folder in runs.items()}
    known += [f for document in documents.values() if out.won for f in _of_slots(document)]
    facts, out.missing = summary(known)
    argvs = {run: document.get("argv") for run, document in documents.items()}
    out.missing += [f"command of the run {run}" for run, argv in argvs.items() if not argv]
    return facts, [f"gemmfleet {shlex.join(map(str, a))}" for a in (*argvs.values(), request.argv) if a]


def _of_slots(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Facts of a run whose winners are no rows: those of its slots."""
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


def types_of(family: Family, rows: Iterable[Settled]) -> set[str]:
    """The data types of rows as people call them, by their own columns, else by the family."""
    columns = [c for c in ("q_dtype_a", "q_dtype_w", "dtype") if c in family.key_names][:2]
    if not columns:
        return {(family_type(family) or ("fp8",))[0]}
    names = {r.new.cells.get(c, "") for r in rows for c in columns}
    return {ELEMENT_TYPES[n][0] if n in ELEMENT_TYPES else n.removeprefix("torch.") for n in names}


def title_of(wanted: str, model: str, parts: Sequence[Part], won: Sequence[WonFile]) -> str:
    """The title, checked where the user gave one. Raises InputError where that names data types of no row."""
    types = {t for p in parts for t in types_of(p.family, p.written)}
    named = {word.lower().removeprefix("mx") for word in _TYPE_WORD.findall(wanted)}
    if not won and (wrong := named - types):
        raise InputError(f"--title names {', '.join(sorted(wrong))}, and the rows are of {', '.join(sorted(types))}")
    chips = sorted({str(r.new.key[0]) for p in parts for r in p.written} | {w.gfx for w in won})
    what = [f"{p.family.name} ({', '.join(sorted(types_of(p.family, p.written)))})" for p in parts if p.written]
    what += sorted({f"Triton {w.kind.config}" for w in won})
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
