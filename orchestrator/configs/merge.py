"""Merge a run's winners into a tree: planned from the files that its project resolves today, proven before and after.

A change is refused as a whole where one winner of it does not hold: its old config is no longer the tree's, an M would
become slower, a key is missing, or the project's own function does not give what was planned.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator import __version__
from orchestrator.configs import engines
from orchestrator.configs.aiter import AiterTree, journal_of
from orchestrator.configs.journal import Journal
from orchestrator.configs.winners import FOLDER, OF_ENGINES, TABLE, WonFile, read_winners
from orchestrator.errors import InputError
from orchestrator.files.cells import utc
from orchestrator.tables.publish import ConfigPart
from orchestrator.tables.run_folders import provenance_of
from worker.triton_configs.resolve import CONFIGS, slower

# the config files of a project for a chip: all that a merge has to know of the project
Tree = AiterTree | engines.EngineTree
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
    callers: tuple[str, ...]


@dataclass(slots=True)
class Merged:
    """The outcome of a merge. `proof` says how the new files were proven to be read, by how many `lookups`. `notes` are
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
            {"file": below(c.path, self.tree), "new": c.before is None, "buckets": list(c.won.winners),
             "copied_from": below(c.source, self.tree), "also_read_by": c.callers}
            for c in self.changes
        ]  # fmt: skip
        return {**{k: getattr(self, k) for k in ("run", "tree", "proof", "lookups", "notes")}, "changes": changes}


def merge(
    run: Path,
    root: Path,
    *,
    engine: Path | None = None,
    default: bool = False,
    lists: Sequence[Path] = (),
    checked: Sequence[str] = (),
) -> Merged:
    """Write the winners of a run's folder into a tree, and note it in the tree's journal.

    `engine`: the vLLM that reads `root`, an override folder. `default`: default files of AITER may change too; then
    every shape that resolves to a changed bucket, of AITER's lists and of `lists`, must be among the run's
    measurements, through every operator that is not among `checked`. Raises InputError; the tree is then as it was.
    """
    is_engine, faults = (run / OF_ENGINES / TABLE).is_file(), list[str]()
    won = read_winners(run, OF_ENGINES if is_engine else FOLDER)
    if (default or lists or checked) if is_engine else engine:
        raise InputError("--engine is for winners of an engine; --allow-default, --shapes, --checked for AITER's")
    opened = engines.opened(root, engine) if is_engine else nullcontext(
        (root, journal_of(root), lambda files: AiterTree(root, files[0].place.device.name))
    )  # fmt: skip
    with opened as (at, journal, tree_of), journal.writing():
        out = Merged(run.name, str(at))
        trees: dict[Any, Tree] = {
            device: tree_of([w for w in won if w.place.device == device])
            for device in dict.fromkeys(w.place.device for w in won)
        }
        for file in won:
            tree = trees[file.place.device]
            try:
                change, against = _plan(tree, file, default=default)
                if change and file.place.default and default and isinstance(tree, AiterTree):
                    against += tree.unmeasured(file, lists, file.path.parent, checked)
            except (ValueError, OSError) as e:  # ResolveError and ConfigFileError among them
                faults.append(f"{file.path.name}: {e}")
            else:
                faults += against
                out.changes += [change] if change else []
        if faults:
            raise InputError(faults)
        if not out.changes:
            out.notes.append("every winner is in the tree already; nothing was written")
            return out
        asked: dict[Any, list[Any]] = {
            device: [*tree.lookups([(c.won, c.path, c.after) for c in out.changes if c.won.place.device == device])]
            for device, tree in trees.items()
        }
        buckets = [
            {"file": below(c.path, at), "copied": below(c.source, at), "measured": {
                name: [[r.b, r.n, r.k, r.m, r.count, r.old_us, r.new_us, r.caller] for r in w.measured]
                for name, w in c.won.winners.items()
            }}
            for c in out.changes
        ]  # fmt: skip
        neighbours = [*journals_of(root), *journals_of(journal.root), *journals_of(journal.root.parent)]
        entry = {
            "run": run.name, "number": 1 + max(j.last_number for j in neighbours), "time": utc(time.time()),
            "gemmfleet": __version__,
            "facts": {k: v for k, v in provenance_of(run).items() if k in _FACTS},
            **({"checked": list(checked)} if checked else {}), "buckets": buckets,
        }  # fmt: skip
        with journal.noted(entry, {c.path: (c.before, c.after) for c in out.changes}):
            trials = [trees[device].prove(some) for device, some in asked.items()]
        out.lookups = sum(map(len, asked.values()))
        out.proof = "; ".join(dict.fromkeys(t.how for t in trials if t.how))
        out.notes += {f"proven by gemmfleet's own reading only: {t.why_not}" for t in trials if t.why_not}
        out.notes += [note for t in trials for note in t.notes]
    return out


def journals_of(root: Path) -> list[Journal]:
    """The journals that a tree can have: of AITER's configs, of an override folder or package, of a vLLM in it."""
    journals = [journal_of(root)] if (root / CONFIGS).is_dir() else []
    return journals + [engines.journal_of(folder) for folder in (root, root / "vllm")]


def undo(root: Path) -> dict[str, Any]:
    """Take back the last merge of a tree. Raises InputError if no merge is noted, or if a file was changed since.

    The number of its last merge says which of several journals is the latest. Version 0.3 wrote no numbers: those are
    the oldest, and told apart by their clock.
    """
    journal = max(journals_of(root), key=lambda j: (j.last_number, j.path.stat().st_mtime if j.path.exists() else 0.0))
    with journal.writing():
        return journal.take_back()


def to_publish(run: Path, checkout: Path) -> ConfigPart:
    """Merge a run's winners into a checkout, for `publish`. Raises InputError."""
    won = read_winners(run)
    merged = merge(run, checkout)
    texts = {str(c.path.relative_to(checkout)): c for c in merged.changes}
    notes = [*merged.notes, *([f"config files: proven by {merged.proof}"] if merged.proof else [])]
    after, buckets = {n: c.after for n, c in texts.items()}, {n: len(c.won.winners) for n, c in texts.items()}
    return ConfigPart(after, buckets, won, notes)


def _plan(tree: Tree, won: WonFile, *, default: bool) -> tuple[Change | None, list[str]]:
    """The change of one file, None where the tree has it already; what is against it. Raises ValueError and OSError."""
    layout, faults = tree.lay_out(won), list[str]()
    source, target, old, new, text = layout
    if new == old:
        return None, []
    if won.place.default and not default:
        return None, [
            f"{won.path.name}: changes a default file, which every shape without a file of its own reads; give"
            " --allow-default after reading what is to be measured again"
        ]
    for name, winner in won.winners.items():
        for row in winner.measured:
            shape, whom = f"M={row.m} {row.sizes}", f" in {row.caller}" if row.caller else ""
            had, gets = (tree.bucket_for(won, buckets, row.m) for buckets in (old, new))
            against = (
                (gets != name, f"{shape} does not resolve to {name} but to {gets}"),
                (old[had] not in (row.old, new.get(name)),
                 f"{shape}: the tree's {had} is another config than the one measured; tune again with this tree"),
                (row.old_us > 0 and slower(row.old_us, row.new_us),
                 f"{shape}{whom} would become slower: {row.old_us:g} -> {row.new_us:g} us; {name} is left as it is"),
            )  # fmt: skip
            faults += [f"{won.path.with_name(TABLE)}:{row.line}: {why}" for wrong, why in against if wrong][:1]
    faults += (f"{target.name}: {f.bucket}: {f.text}".replace(": :", ":") for f in tree.check(won, layout))
    before = target.read_text() if target == source and target.exists() else None
    return Change(won, target, source, before, text, tree.readers(won)), faults


def below(path: Path, root: Path | str) -> str:
    """A path as it is below a tree; whole if it is elsewhere."""
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)
