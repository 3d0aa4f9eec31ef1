"""AITER as a project of config files: where its tree has them, what it reads of them, and what it must answer.

`AiterTree` is the `ConfigTree` that a merge works with (`config_tree.py` has the order of its calls). Its answers are
of AITER's own function (`aiter_trial.py`), or else of our reading of the files (`worker/triton_configs/resolve.py`).
`default_readers.py` says which shapes a changed default file moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from orchestrator.configs.aiter_trial import run_trial
from orchestrator.configs.config_tree import FileChange, LookupProof, PlannedLookup, compare_answers
from orchestrator.configs.default_readers import missing_measurements, other_operators
from orchestrator.configs.journal import MergeJournal
from orchestrator.configs.lint import lint_content
from orchestrator.configs.winners import WinnerFile
from orchestrator.errors import InputError
from worker.triton_configs.config_file import Bucket, bound_of, parse_config_file
from worker.triton_configs.kinds import BY_CONFIG, ConfigKind
from worker.triton_configs.resolve import CONFIGS, ResolveError, Resolver, bucket_for
from worker.triton_configs.tree_files import FilePlan, list_files, plan_file


def aiter_journal(root: Path) -> MergeJournal:
    """The journal of a tree's merges. Raises InputError where the tree has no configs."""
    folder = root / CONFIGS
    if not folder.is_dir():
        raise InputError(f"{root}: has no Triton configs of AITER ({CONFIGS}); name the folder that holds `aiter/`")
    return MergeJournal(folder, root)


class DefaultFileOptions(NamedTuple):
    """The options of a merge for default files, which every shape without a file of its own reads."""

    may_change: bool = False
    """They may change. Then every shape that reads a changed bucket must be among the run's measurements, through every
    operator: the shapes are those of AITER's lists and of `lists`."""
    lists: Sequence[Path] = ()
    """Lists of shapes of the user's models."""
    checked: Sequence[str] = ()
    """Operators that the user vouches for: nothing has to be measured through them."""


class AiterTree:
    """The config files of a tree of AITER for a chip."""

    def __init__(self, root: Path, gfx: str, default_files: DefaultFileOptions) -> None:
        """Raises InputError where the tree has no loader that is known."""
        self.root = root
        self.gfx = gfx
        self.default_files = default_files
        try:
            self.resolver = Resolver(root, gfx)
        except ResolveError as e:
            raise InputError(str(e)) from e

    def plan_file(self, winner_file: WinnerFile) -> FilePlan:
        """The file that holds winners, with its text. Raises ValueError and OSError."""
        place = winner_file.place
        shape = None if place.is_default else winner_file.shape
        plan = plan_file(self.resolver, place.kind, shape, winner_file.values)
        if place.is_default and plan.new != plan.old and not self.default_files.may_change:
            raise ValueError(
                "changes a default file, which every shape without a file of its own reads; give --allow-default after"
                " reading what is to be measured again"
            )
        return plan

    def faults(self, winner_file: WinnerFile, plan: FilePlan) -> Iterator[str]:
        """Bounds that were not measured, findings on the winners' buckets and on the file as a whole, and readers of a
        default file that were not measured."""
        for name, winner in winner_file.winners.items():
            side, bound = bound_of(name)
            if side != "any" and bound not in {row.m for row in winner.measured}:
                yield f"{plan.file.target.name}: {name}: was not measured at M={bound}, its bound"
        kind = winner_file.place.kind
        file = parse_config_file(plan.file.text, plan.file.target)
        for finding in lint_content(file, kind, self.resolver.bounds(kind), winner_file.place.device.name):
            forbids = finding.level == "error" or finding.rule == "required"
            if forbids and not finding.bucket:
                yield f"{plan.file.target.name}: {finding.text}"
            elif forbids and finding.bucket in winner_file.winners:
                yield f"{plan.file.target.name}: {finding.bucket}: {finding.text}"
        if winner_file.place.is_default:
            options = self.default_files
            yield from missing_measurements(self.resolver, winner_file, options.lists, options.checked)

    def bucket_for(self, winner_file: WinnerFile, buckets: Mapping[str, Bucket], m: int) -> str:
        """The name of the bucket that AITER takes for an M."""
        return bucket_for(buckets, m, self.resolver.bounds(winner_file.place.kind))

    def readers(self, winner_file: WinnerFile) -> tuple[str, ...]:
        """Other operators that read its files."""
        return tuple(other_operators(self.resolver, winner_file.place.kind))

    def planned_lookups(self, changes: Sequence[FileChange]) -> list[PlannedLookup]:
        """The answers that AITER must give, at every bound and just above it: for the shapes of the changed files as
        planned; for all other shapes of these kinds that have files, and for one that has none, as now."""
        new_buckets = {change.path: parse_config_file(change.after).buckets for change in changes}
        tree_files, _ = list_files(self.resolver)
        lookups: list[PlannedLookup] = []
        for kind in {change.winner_file.place.kind for change in changes}:
            shapes = {file.sizes for file in tree_files if file.kind is kind and file.sizes}
            shapes |= {change.winner_file.shape for change in changes if change.winner_file.place.kind is kind}
            largest_n = max(n for _, n, _ in shapes)
            shapes.add((None, largest_n + 1, 64))  # one without a file, which reads the default
            for shape in sorted(shapes, key=str):
                lookups += self._lookups_of_shape(kind, shape, new_buckets)
        self.prove(lookups, after=False)
        return lookups

    def _lookups_of_shape(
        self, kind: ConfigKind, shape: tuple[int | None, int, int], new_buckets: Mapping[Path, dict[str, Bucket]]
    ) -> Iterator[PlannedLookup]:
        """The lookups of a shape (B, N, K) at every bound and just above it. `new_buckets`: of the changed files."""
        resolver = self.resolver
        bounds = resolver.bounds(kind)
        b, n, k = shape
        if not (kind.batch_in_name and resolver.loader.knows_batch):
            b = None
        path, _ = resolver.file_for(kind, n, k, b)
        own_path = resolver.own_file(kind, n, k, b)
        before = resolver.read(path).buckets
        after = new_buckets.get(own_path) or new_buckets.get(path) or before
        arguments = {"config_name": kind.config, "N": n, "K": k, "bounds": bounds, "B": b, "backend": None}
        if resolver.loader.knows_backend:
            arguments["backend"] = kind.backend
        for m in sorted({*bounds, *(x + 1 for x in bounds)}):
            try:
                values_before = before[bucket_for(before, m, bounds)]
            except ResolveError:
                continue  # the file has no bucket for this M, so AITER fails there as it is
            name = f"{kind.config} M={m} N={n} K={k}"
            values_after = after[bucket_for(after, m, bounds)]
            yield PlannedLookup(name, {**arguments, "M": m}, values_before, values_after)

    def prove(self, lookups: Sequence[PlannedLookup], *, after: bool = True) -> LookupProof:
        """AITER's function, else a fresh resolver, gives what it must. Raises InputError where it does not."""
        trial = run_trial(self.root, self.gfx, [lookup.call for lookup in lookups], alone=not after)
        answers: Iterable[Bucket | None] = trial.answers
        if trial.why_not:
            answers = self._resolve_anew(lookups)
        compare_answers(self.root, "AITER's get_gemm_config", lookups, answers, after=after)
        notes: list[str] = []
        if trial.why_not:
            notes.append(f"proven by gemmfleet's own reading only: {trial.why_not}")
        return LookupProof(trial.how, notes)

    def _resolve_anew(self, lookups: Sequence[PlannedLookup]) -> Iterator[Bucket]:
        """The answers by our own reading of the files as they are now."""
        resolver = Resolver(self.root, self.gfx)
        for lookup in lookups:
            call = lookup.call
            kind = BY_CONFIG[call["config_name"]]
            yield resolver.config_for(kind, call["M"], call["N"], call["K"], call["B"]).values
