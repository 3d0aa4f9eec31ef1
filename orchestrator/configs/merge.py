"""Merge a run's winners into a tree of config files; `journal.undo_merge` takes a merge back.

`merge_run` opens the tree of each device (`ConfigTree`), plans the new text of each file, proves that the project reads
the files as we do, writes them under the journal (`journal.py`), and proves them again. It writes all files or none: it
refuses if one winner does not hold, because its old config is no longer the tree's, an M would become slower, a key is
missing, or the project's own function does not give what was planned. Only a publication may leave out the files that
do not hold.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator import __version__
from orchestrator.configs.aiter_tree import AiterTree, DefaultFileOptions, aiter_journal
from orchestrator.configs.bucket_decision import MeasuredShape
from orchestrator.configs.config_tree import ConfigTree, FileChange, LookupProof
from orchestrator.configs.engine_tree import EngineTree, open_target
from orchestrator.configs.journal import MergeJournal, journals_of
from orchestrator.configs.winners import TABLE, WinnerFile, engine_of_winners, read_winners
from orchestrator.errors import InputError
from orchestrator.files.cells import utc
from orchestrator.tables.run_folders import provenance_of
from worker.text import and_more
from worker.triton_configs.engine_package import EngineDevice
from worker.triton_configs.slowdown import is_slower
from worker.triton_configs.tree_files import FilePlan

KEPT_FACTS = ("run", "tuner", "code", "devices", "images", "measured_on")
"""Fields of a run's provenance that its journal's entry has."""


class RefusedFile(NamedTuple):
    """A file whose winners do not hold, and all reasons."""

    winner_file: WinnerFile
    faults: list[str]


@dataclass(slots=True)
class MergeReport:
    """The outcome of a merge."""

    run: str
    tree: str
    changes: list[FileChange] = field(default_factory=list)
    proof: str = ""
    """The function that proved the new files (`LookupProof.how`)."""
    lookups: int = 0
    """The number of its answers that were compared."""
    notes: list[str] = field(default_factory=list)
    """Sentences for the user."""
    refused: list[RefusedFile] = field(default_factory=list)
    """Files that were left out, if the merge may leave some out."""

    def to_json(self) -> dict[str, Any]:
        """The document of `--json`."""
        changes = [
            {
                "file": path_below(change.path, self.tree),
                "new": change.before is None,
                "buckets": list(change.winner_file.winners),
                "copied_from": path_below(change.source, self.tree),
                "also_read_by": change.readers,
            }
            for change in self.changes
        ]
        return {
            "run": self.run,
            "tree": self.tree,
            "proof": self.proof,
            "lookups": self.lookups,
            "notes": self.notes,
            "changes": changes,
        }


class MergeTarget(NamedTuple):
    """The journal of the folder that a merge writes to (`MergeJournal.root`), and the tree of each device of the
    winners."""

    journal: MergeJournal
    trees: Mapping[EngineDevice, ConfigTree]


def merge_run(
    run: Path,
    root: Path,
    *,
    engine: Path | None = None,
    default: bool = False,
    lists: Sequence[Path] = (),
    checked: Sequence[str] = (),
    leave_out_refused: bool = False,
) -> MergeReport:
    """Write the winners of a run's folder into a tree, and note it in the tree's journal.

    `engine`: the vLLM that reads `root`, an override folder; `default`, `lists`, `checked`: see `DefaultFileOptions`;
    `leave_out_refused`: write the other files if one does not hold. Raises InputError; the tree is then as it was.
    """
    _refuse_interpreted(run)
    is_engine = bool(engine_of_winners(run))
    winner_files = read_winners(run)
    has_aiter_options = bool(default or lists or checked)
    if (engine and not is_engine) or (has_aiter_options and is_engine):
        raise InputError("--engine is for winners of an engine; --allow-default, --shapes, --checked for AITER's")
    if is_engine:
        opened = _open_engine(winner_files, root, engine)
    else:
        opened = _open_aiter(winner_files, root, DefaultFileOptions(default, lists, checked))
    with opened as target:
        report = MergeReport(run.name, str(target.journal.root))
        report.changes, report.refused = _plan_changes(winner_files, target.trees)
        if report.refused and not leave_out_refused:
            raise InputError([fault for file in report.refused for fault in file.faults])
        if not report.changes and not report.refused:
            report.notes.append("every winner is in the tree already; nothing was written")
        if report.changes:
            _write_and_prove(report, target, _journal_entry(run, root, target, report.changes, checked))
    return report


def _refuse_interpreted(run: Path) -> None:
    """Raise InputError for a run that measured in Triton's interpreter, which `DeviceBench.info` of the worker says."""
    devices = provenance_of(run).get("devices") or ()
    nodes = sorted({str(entry["node"]) for entry in devices if "interpreter" in (entry.get("device") or {})})
    if nodes:
        raise InputError(
            f"{run}: {and_more(nodes, 4)} measured in Triton's interpreter (TRITON_INTERPRET=1), whose times say"
            " nothing about a GPU; tune on a GPU"
        )


@contextmanager
def _open_aiter(
    winner_files: Sequence[WinnerFile], root: Path, default_files: DefaultFileOptions
) -> Iterator[MergeTarget]:
    """The target of a merge into a tree of AITER, with its journal locked. Raises InputError."""
    journal = aiter_journal(root)
    with journal.writing():
        devices = _by_device(winner_files)
        yield MergeTarget(journal, {device: AiterTree(root, device.name, default_files) for device in devices})


@contextmanager
def _open_engine(winner_files: Sequence[WinnerFile], root: Path, engine: Path | None) -> Iterator[MergeTarget]:
    """The target of a merge into an engine's package or override folder, with its journal locked. Raises InputError."""
    with open_target(root, engine) as engine_target:
        journal = MergeJournal(engine_target.root)
        with journal.writing():
            files_by_device = _by_device(winner_files)
            trees = {device: EngineTree(engine_target, files) for device, files in files_by_device.items()}
            yield MergeTarget(journal, trees)


def _by_device(winner_files: Sequence[WinnerFile]) -> dict[EngineDevice, list[WinnerFile]]:
    by_device: dict[EngineDevice, list[WinnerFile]] = {}
    for file in winner_files:
        by_device.setdefault(file.place.device, []).append(file)
    return by_device


def _plan_changes(
    winner_files: Sequence[WinnerFile], trees: Mapping[EngineDevice, ConfigTree]
) -> tuple[list[FileChange], list[RefusedFile]]:
    """The files to be written, none for winners that the tree has already; those that do not hold."""
    changes: list[FileChange] = []
    refused: list[RefusedFile] = []
    for file in winner_files:
        tree = trees[file.place.device]
        try:
            plan = tree.plan_file(file)
            if plan.new == plan.old:
                continue
            faults = [*_faults_of_times(tree, file, plan), *tree.faults(file, plan)]
            planned = list(_changes_of(tree, file, plan))
        except (ValueError, OSError) as e:  # ResolveError and ConfigFileError among them
            faults = [f"{file.path.name}: {e}"]
        if faults:
            refused.append(RefusedFile(file, faults))
        else:
            changes += planned
    return changes, refused


def _changes_of(tree: ConfigTree, winner_file: WinnerFile, plan: FilePlan) -> Iterator[FileChange]:
    """The change of each file of a plan."""
    files = [plan.file, plan.beside] if plan.beside else [plan.file]
    for source, target, text in files:
        before = None
        if target == source and target.exists():
            before = target.read_bytes().decode()  # with its line ends, so that `configs undo` gives back every byte
        yield FileChange(winner_file, target, source, before, text, tree.readers(winner_file))


def _faults_of_times(tree: ConfigTree, winner_file: WinnerFile, plan: FilePlan) -> Iterator[str]:
    """The measurements of a file that speak against it, by their lines in the run's table."""
    table = winner_file.path.with_name(TABLE)
    for name, winner in winner_file.winners.items():
        for row in winner.measured:
            fault = _fault_of_measurement(tree, winner_file, plan, name, row)
            if fault:
                yield f"{table}:{row.line}: {fault}"


def _fault_of_measurement(
    tree: ConfigTree, winner_file: WinnerFile, plan: FilePlan, name: str, row: MeasuredShape
) -> str:
    """The reason why the winner of this name does not hold at an M that it was measured at, "" if it holds."""
    had = tree.bucket_for(winner_file, plan.old, row.m)
    gets = tree.bucket_for(winner_file, plan.new, row.m)
    shape = f"M={row.m} {row.sizes}"
    if gets != name:
        return f"{shape} does not resolve to {name} but to {gets}"
    if plan.old[had] not in (row.old, plan.new.get(name)):
        return f"{shape}: the tree's {had} is another config than the one measured; tune again with this tree"
    if row.old_us > 0 and is_slower(row.old_us, row.new_us):
        where = f" in {row.caller}" if row.caller else ""
        times = f"{row.old_us:g} -> {row.new_us:g} us"
        return f"{shape}{where} would become slower: {times}; {name} is left as it is"
    return ""


def _journal_entry(
    run: Path, root: Path, target: MergeTarget, changes: Sequence[FileChange], checked: Sequence[str]
) -> dict[str, Any]:
    """A merge's entry in the journal: run, number, time, provenance, and each bucket's measurements."""
    journals = [*journals_of(root), *journals_of(target.journal.root), *journals_of(target.journal.root.parent)]
    provenance = provenance_of(run)
    entry: dict[str, Any] = {
        "run": run.name,
        "number": 1 + max(journal.last_number for journal in journals),
        "time": utc(time.time()),
        "gemmfleet": __version__,
        "facts": {name: value for name, value in provenance.items() if name in KEPT_FACTS},
    }
    if checked:
        entry["checked"] = list(checked)
    entry["buckets"] = [_change_in_journal(change, target.journal.root) for change in changes]
    return entry


def _change_in_journal(change: FileChange, root: Path) -> dict[str, Any]:
    """A file of a journal's entry. Each of its buckets has a row `[B, N, K, M, count, old us, new us, caller]` for each
    measurement: `[null, 1280, 8192, 16, 3, 9.6, 8.1, ""]`."""
    measured: dict[str, list[list[Any]]] = {}
    for name, winner in change.winner_file.winners.items():
        measured[name] = [[r.b, r.n, r.k, r.m, r.count, r.old_us, r.new_us, r.caller] for r in winner.measured]
    return {"file": path_below(change.path, root), "copied": path_below(change.source, root), "measured": measured}


def _write_and_prove(report: MergeReport, target: MergeTarget, entry: Mapping[str, Any]) -> None:
    """Prove the tree as it is, write the changes, and prove them; a proof that fails takes them back."""
    lookups = {}
    for device, tree in target.trees.items():
        changes = [change for change in report.changes if change.winner_file.place.device == device]
        lookups[device] = tree.planned_lookups(changes)
    proofs: list[LookupProof] = []
    texts = {change.path: (change.before, change.after) for change in report.changes}
    with target.journal.note_and_write(entry, texts):
        for device, planned_lookups in lookups.items():
            proofs.append(target.trees[device].prove(planned_lookups))
    report.lookups = sum(map(len, lookups.values()))
    report.proof = "; ".join(dict.fromkeys(proof.how for proof in proofs if proof.how))
    report.notes += dict.fromkeys(note for proof in proofs for note in proof.notes)


def path_below(path: Path, root: Path | str) -> str:
    """A path as it is below a tree; whole if it is elsewhere."""
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)
