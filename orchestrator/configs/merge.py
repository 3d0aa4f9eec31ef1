"""Merge a run's winners into a tree: planned from the files that AITER resolves today, proven before and after.

A change is refused as a whole where one winner of it does not hold: its old config is no longer the tree's, an M would
become slower, a key is missing, or AITER's own function does not give what was planned.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator import __version__
from orchestrator.configs import journal
from orchestrator.configs.recheck import operators, recheck, resolver_of
from orchestrator.configs.trial import Call, Trial, run_trial
from orchestrator.configs.winners import FOLDER, TABLE, Measured, WonFile, read_winners
from orchestrator.errors import InputError
from orchestrator.tables.locate import provenance_of
from orchestrator.tables.write import utc
from worker.triton_configs.kinds import BY_CONFIG
from worker.triton_configs.layout import lay_out
from worker.triton_configs.lint import lint_content, shipped
from worker.triton_configs.resolve import Bucket, Resolver, bound_of, bucket_for, parse, slower

_FACTS = ("run", "tuner", "code", "devices", "images", "measured_on")


@dataclass(frozen=True, slots=True)
class Change:
    """A file to be written. `before`: its text, None for a new file; `source`: the file whose buckets it holds;
    `callers`: other readers of it on this chip."""

    won: WonFile
    path: Path
    source: Path
    before: str | None
    after: str
    buckets: tuple[str, ...]
    callers: tuple[str, ...]


@dataclass(slots=True)
class Merged:
    """The outcome of a merge. `proof`: how the new files were proven to be read, by so many `lookups`; `notes`: remarks
    for the user."""

    run: str
    tree: str
    changes: list[Change] = field(default_factory=list)
    proof: str = ""
    lookups: int = 0
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The document of `--json`."""
        changes = [
            {"file": str(c.path.relative_to(self.tree)), "new": c.before is None, "buckets": c.buckets,
             "copied_from": str(c.source.relative_to(self.tree)), "also_read_by": c.callers}
            for c in self.changes
        ]  # fmt: skip
        return {**{k: getattr(self, k) for k in ("run", "tree", "proof", "lookups", "notes")}, "changes": changes}


def merge(
    run: Path, root: Path, *, default: bool = False, lists: Sequence[Path] = (), checked: Sequence[str] = ()
) -> Merged:
    """Write the winners of a run's folder into a tree, and note it in the tree's journal.

    `default`: default files may change too; then every shape that resolves to a changed bucket, of AITER's lists and of
    `lists`, must be among the run's measurements, through every operator that is not among `checked`. Raises
    InputError; the tree is then as it was.
    """
    won = read_winners(run)
    out = Merged(run.name, str(root))
    with journal.writing(root) as book:
        resolvers = {gfx: resolver_of(root, gfx) for gfx in sorted({w.gfx for w in won})}
        faults: list[str] = []
        for file in won:
            try:
                change = _plan(resolvers[file.gfx], file, default=default, faults=faults, run=run)
                if change and file.default and default:
                    faults += recheck(resolvers[file.gfx], file, lists, run / FOLDER, checked)
            except (ValueError, OSError) as e:  # ResolveError and ConfigFileError among them
                faults.append(f"{file.path.name}: {e}")
            else:
                out.changes += [change] if change else []
        if faults:
            raise InputError(faults)
        if not out.changes:
            out.notes.append("every winner is in the tree already; nothing was written")
            return out
        asked = {g: lookups(r, [c for c in out.changes if c.won.gfx == g]) for g, r in resolvers.items()}
        for gfx, some in asked.items():
            _prove(root, gfx, some, after=False)
        facts = {k: v for k, v in provenance_of(run).items() if k in _FACTS}
        entry: dict[str, Any] = {"run": run.name, "time": utc(time.time()), "gemmfleet": __version__, "facts": facts}
        entry |= {"checked": list(checked)} if checked else {}
        entry["buckets"] = [_provenance(c, root) for c in out.changes]
        journal.record(book, root, entry, {c.path: (c.before, c.after) for c in out.changes})
        try:
            trials = [_prove(root, gfx, some, after=True) for gfx, some in asked.items()]
        except BaseException:
            journal.take_back(book, root)
            raise
        out.lookups = sum(map(len, asked.values()))
        out.proof = "; ".join(dict.fromkeys(t.how for t in trials if t.how))
        out.notes += {f"proven by gemmfleet's own reading only: {t.why_not}" for t in trials if t.why_not}
    return out


def _plan(resolver: Resolver, won: WonFile, *, default: bool, faults: list[str], run: Path) -> Change | None:
    """The change of one file, None where the tree has it already; what is against it goes to `faults`."""
    kind, bounds = won.kind, resolver.bounds(won.kind)
    shape = None if won.default else won.shape
    source, target, old, new, text = lay_out(resolver, kind, shape, {w.bucket: w.values for w in won.winners.values()})
    if new == old:
        return None
    if won.default and not default:
        faults.append(
            f"{won.path.name}: changes a default file, which every shape without a file of its own reads; give"
            " --allow-default after reading what is to be measured again"
        )
        return None
    for winner in won.winners.values():
        side, bound = bound_of(winner.bucket)
        if side != "any" and not any(r.m == bound for r in winner.measured):
            faults.append(f"{won.path.name}: {winner.bucket} was not measured at M={bound}, its bound")
        if lacking := [key for key in kind.required_on(won.gfx) if key not in new[winner.bucket]]:
            faults.append(f"{won.path.name}: {winner.bucket} lacks {', '.join(lacking)}")
        for row in winner.measured:
            if why := _against(row, winner.bucket, old, new, bounds):
                faults.append(f"{run / FOLDER / TABLE}:{row.line}: {why}")
    for finding in lint_content(parse(text, target), kind, bounds, won.gfx):
        if finding.level == "error" and (finding.bucket in won.winners or not finding.bucket):
            faults.append(f"{target.name}: {finding.bucket}: {finding.text}".replace(": :", ":"))
    before = resolver.read(source).text if target == source else None
    return Change(won, target, source, before, text, tuple(won.winners), tuple(operators(resolver, kind)))


def _against(row: Measured, bucket: str, old: dict[str, Bucket], new: dict[str, Bucket], bounds: Sequence[int]) -> str:
    """Reason for which a measurement does not allow the change; "" where it does."""
    shape = f"{f'B={row.b} ' if row.b else ''}M={row.m} N={row.n} K={row.k}"
    if bucket_for(new, row.m, bounds) != bucket:
        return f"{shape} does not resolve to {bucket} but to {bucket_for(new, row.m, bounds)}"
    had = bucket_for(old, row.m, bounds)
    if old[had] not in (row.old, new[bucket]):
        return f"{shape}: the tree's {had} is another config than the one measured; tune again with this tree"
    if row.old_us > 0 and slower(row.old_us, row.new_us):
        whom = f" in {row.caller}" if row.caller else ""
        return f"{shape}{whom} would become slower: {row.old_us:g} -> {row.new_us:g} us; {bucket} is left as it is"
    return ""


class Lookup(NamedTuple):
    """A call of `get_gemm_config`, and its answers before and after a merge."""

    call: Call
    now: Bucket
    then: Bucket


def lookups(resolver: Resolver, changes: Sequence[Change]) -> list[Lookup]:
    """Answers that AITER must give for one chip, at every bound and just above: the changed files as planned, and the
    shapes of their neighbours, and one without a file, as now."""
    texts = {c.path: parse(c.after).buckets for c in changes}
    files = shipped(resolver)[0]
    out = []
    for kind in {c.won.kind for c in changes}:
        shapes = {f.named for f in files if f.kind is kind and f.named}
        shapes |= {c.won.shape for c in changes if c.won.kind is kind}
        bounds = resolver.bounds(kind)
        for b, n, k in sorted({*shapes, (None, max(n for _, n, _ in shapes) + 1, 64)}, key=str):
            b = b if kind.batch_in_name and resolver.loader.batch else None
            path, _ = resolver.file_for(kind.config, n, k, b, kind.backend)
            now = resolver.read(path).buckets
            then = texts.get(resolver.target(kind.config, n, k, b, kind.backend)) or texts.get(path) or now
            for m in sorted({m for x in bounds for m in (x, x + 1)}):
                call = Call(kind.config, m, n, k, bounds, kind.backend if resolver.loader.backend else None, b)
                out.append(Lookup(call, now[bucket_for(now, m, bounds)], then[bucket_for(then, m, bounds)]))
    return out


def _prove(root: Path, gfx: str, some: Sequence[Lookup], *, after: bool) -> Trial:
    """AITER's function, else a fresh resolver, gives what it must. Raises InputError where it does not."""
    trial = run_trial(root, gfx, [x.call for x in some], alone=not after)
    given = trial.answers
    if trial.why_not:
        fresh = Resolver(root, gfx)
        given = tuple(fresh.config_for(BY_CONFIG[c.config_name], c.M, c.N, c.K, c.B).values for c, _, _ in some)
    for (call, now, then), values in zip(some, given, strict=True):
        if values != (then if after else now):
            what = "does not give what was planned, and everything is as it was" if after else (
                "reads this tree in another way than gemmfleet, and nothing was written"
            )  # fmt: skip
            shape = f"{call.config_name} M={call.M} N={call.N} K={call.K}"
            raise InputError(f"{root}: AITER's get_gemm_config {what}: {shape} gives {json.dumps(values)}")
    return trial


def _provenance(change: Change, root: Path) -> dict[str, object]:
    """Fields of a journal's line on a file's buckets."""
    rows = {
        w.bucket: [[r.b, r.n, r.k, r.m, r.count, r.old_us, r.new_us, r.caller] for r in w.measured]
        for w in change.won.winners.values()
    }
    return {
        "file": str(change.path.relative_to(root)),
        "copied": str(change.source.relative_to(root)),
        "measured": rows,
    }
