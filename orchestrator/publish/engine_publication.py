"""The publication for vLLM and SGLang (`publication.py` is the flow): config files with the times of each M.

`make_commits` merges the winners of each run into the worktree, as `configs merge` does (`configs/merge.py`). A file
that does not hold is left out with its reasons, such as an M that would become slower. The journal of the merge is not
committed. The text has a `LayerTable` for each layer of a file, with the times that `configs/measured_ms.py` reads.
What the text says of the engines' own scripts and servers stands in its template.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator import __version__
from orchestrator.configs.config_tree import FileChange
from orchestrator.configs.measured_ms import FileLayer, MeasuredM, measured_of_run
from orchestrator.configs.merge import MergeReport, merge_run, path_below
from orchestrator.configs.winners import WinnerFile, engine_of_winners
from orchestrator.errors import InputError
from orchestrator.publish.evidence import Evidence, FactNames, collect_evidence
from orchestrator.publish.publication import PlannedCommit, Published, PublishRequest, nothing_to_publish
from orchestrator.tables.run_folders import provenance_of
from worker.triton_configs import slowdown
from worker.triton_configs.engine_package import (
    PROJECTS,
    EnginePackage,
    Layer,
    ServingEngineError,
    locate_engine,
)
from worker.triton_configs.m_ranges import USUAL_KEYS

DECODE_MS = [m for m in USUAL_KEYS if m <= 256]
"""Usual numbers of requests that a server runs at once."""
MOST_ROWS = 400
"""If the tables have more M, only the usual keys are shown: GitHub refuses a text of over 65,536 characters."""
TITLE_TAGS = {"vllm": "[Kernel][Perf]", "sglang": "[MoE]"}
KIND_NAMES = {"moe": "fused MoE", "linear": "block-FP8 linear"}
"""Names of a layer's kind in the text."""
SCRIPTS = {
    ("vllm", "moe"): "benchmarks/kernels/benchmark_moe.py",
    ("vllm", "linear"): "benchmarks/kernels/bench_block_fp8_gemm.py",
    ("sglang", "moe"): "benchmark/kernels/fused_moe_triton/benchmark_sglang_fused_moe_triton.py",
}
"""The engines' own scripts that time what the look-up chooses. The text has their commands; they are not run here."""
FACTS = FactNames(
    {
        "device": "GPU",
        "driver": "driver",
        "cuda": "CUDA",
        "rocm": "ROCm",
        "torch": "torch",
        "triton": "Triton",
        "engine": "engine when measured",
        "image": "image digest",
    },
    needed=("device", "driver", "triton", "engine"),
)


@dataclass(slots=True)
class LayerTable:
    """The times of a layer in a file. `file`: its path below the checkout; `before`: `default`, `shipped`, or the name
    of the folder that the configs before were read from."""

    file: str
    layer: Layer
    before: str
    rows: list[MeasuredM]
    changed_ranges: str
    """The M that get another config, such as `1-20, 57-80`."""

    @property
    def title(self) -> str:
        """The layer in words."""
        block = f", block_shape {list(self.layer.block)}" if self.layer.block else ""
        return f"{KIND_NAMES[self.layer.op]} {self.layer.sizes_in_words}, {self.layer.dtype or 'bf16'}{block}"

    @property
    def changed(self) -> list[MeasuredM]:
        """The measured M that get another config."""
        return [row for row in self.rows if not row.is_kept]

    @property
    def kept(self) -> list[MeasuredM]:
        """The measured M that keep their config."""
        return [row for row in self.rows if row.is_kept]

    @property
    def changes(self) -> list[float]:
        """The changes at all M that get another config, at all routings."""
        return [change for row in self.changed for change in row.changes] or [0.0]

    @property
    def mean_change(self) -> float:
        """The geometric mean of `changes`."""
        logs = [math.log1p(change) for change in self.changes]
        return math.expm1(sum(logs) / len(logs))


@dataclass(slots=True)
class EnginePublication:
    """The winners of runs for a checkout of an engine, such as "vllm"."""

    engine: str
    runs: Sequence[Path]
    template: str = "engine-pull-request.md.j2"
    tables: list[LayerTable] = field(default_factory=list)
    winner_files: list[WinnerFile] = field(default_factory=list)
    """The files that are published."""
    refused: list[str] = field(default_factory=list)
    """The reasons why files were left out."""
    missing_scripts: list[str] = field(default_factory=list)
    """Scripts of SCRIPTS that the checkout lacks."""

    @property
    def branch_words(self) -> list[str]:
        """The name of what is published, for the name of the branch."""
        return [f"{self.engine}-configs"]

    def make_commits(self, request: PublishRequest, tree: Path, published: Published) -> list[PlannedCommit]:
        """See `Publication`."""
        package = self._package_in(tree, request.onto)
        texts: dict[str, str] = {}
        for run in self.runs:
            try:
                report = merge_run(run, package.folder, leave_out_refused=True)
            except InputError as e:
                raise InputError([fault.replace(str(tree), str(request.onto)) for fault in e.faults]) from e
            texts |= self._take_changes(report, run, tree.resolve(), published)
        if not texts:
            raise nothing_to_publish(published, self.refused + published.notes)
        self._compare_kernels(package, tree.resolve(), published)
        self.missing_scripts = [path for path in SCRIPTS.values() if not (tree / path).is_file()]
        published.rows += [row for table in self.tables for row in _rows_of(table)]
        published.title = request.title or self._title(request.model)
        return [PlannedCommit(published.title, texts)]

    def _package_in(self, tree: Path, onto: Path) -> EnginePackage:
        """The engine's package in the worktree. Raises InputError if the checkout is another project's."""
        wanted = PROJECTS[self.engine].title
        way_out = f"the winners are for {wanted}: give a checkout of it"
        try:
            package = locate_engine(tree)
        except ServingEngineError:
            raise InputError(f"{onto}: is not a checkout of {wanted}; {way_out}") from None
        if package.project != self.engine:
            raise InputError(f"{onto}: is a checkout of {PROJECTS[package.project].title}; {way_out}")
        return package

    def _take_changes(self, report: MergeReport, run: Path, tree: Path, published: Published) -> dict[str, str]:
        """The texts of the files that a merge wrote, by path below the checkout; noted with what it left out."""
        texts: dict[str, str] = {}
        measured = measured_of_run(run)
        for change in report.changes:
            file = path_below(change.path, tree)
            texts[file] = _text_of(change, run)
            tables = _tables_of(change, file, measured)
            published.files[file] = dict(Counter(row.outcome for table in tables for row in table.rows))
            if change.path.name != change.winner_file.path.name:
                continue  # the file of the second product has the same rows
            self.winner_files.append(change.winner_file)
            self.tables += tables
            if change.readers:
                published.notes.append(f"{change.path.name} is also read by {', '.join(change.readers)}")
        for winner_file, faults in report.refused:
            # a public text does not show the folders of this machine
            reasons = [fault.removeprefix(f"{winner_file.path.parent}/") for fault in faults]
            self.refused += [f"{winner_file.path.name}: {reason}" for reason in reasons]
            published.rows.append({"file": winner_file.path.name, "outcome": "refused", "why": "; ".join(reasons)})
        published.notes += report.notes
        if report.proof:
            result = f"{report.proof} gives the expected config {report.lookups:,} times of {report.lookups:,}"
            published.add_check(f"look-up, {run.name}", passed=True, text=result)
        return texts

    def _compare_kernels(self, package: EnginePackage, tree: Path, published: Published) -> None:
        """Add whether the checkout has the kernels that were measured. A newer kernel is allowed, but a reviewer has
        to know."""
        names = PROJECTS[self.engine]
        for file in self.winner_files:
            module = names.moe if file.layers[0].op == "moe" else names.fp8
            kernel = package.folder.resolve().parent / Path(*module.split(".")).with_suffix(".py")
            digest = hashlib.sha256(kernel.read_bytes()).hexdigest()
            measured = file.place.engine
            origin = f"measured with {self.engine} {measured.version or 'of a checkout'} (sha256 {measured.source}...)"
            result = f"the same file as {origin}"
            if not digest.startswith(measured.source):
                result = f"another file than {origin}"
            name = f"kernel, {path_below(kernel, tree)}"
            published.checks = [check for check in published.checks if check.name != name]
            published.add_check(name, passed=True, text=result)

    def _title(self, model: str) -> str:
        """`[Kernel][Perf] Tune fused MoE configs of MODEL on NVIDIA H200`."""
        kinds = sorted({KIND_NAMES[table.layer.op] for table in self.tables})
        devices = sorted({file.place.device.name for file in self.winner_files})
        return f"{TITLE_TAGS[self.engine]} Tune {' and '.join(kinds)} configs of {model} on {', '.join(devices)}"

    def check_branch(self, request: PublishRequest, tree: Path, published: Published) -> None:
        """Nothing is left to check: the merge has asked the engine's own look-up."""

    def evidence(self, request: PublishRequest) -> Evidence:
        """See `Publication`."""
        return collect_evidence([], self.runs, request.runs, FACTS, has_config_files=True)

    def text_values(self, request: PublishRequest, published: Published) -> dict[str, Any]:
        """See `Publication`."""
        has_too_many = sum(len(table.rows) for table in self.tables) > MOST_ROWS
        return {
            "engine": self.engine,
            "tables": self.tables,
            "refused": self.refused,
            "usual_ms": USUAL_KEYS,
            "shown_ms": USUAL_KEYS if has_too_many else None,
            "scripts": {op: path for (engine, op), path in SCRIPTS.items() if engine == self.engine},
            "missing_scripts": self.missing_scripts,
            "decode_m": _decode_m(self.tables),
            "version": __version__,
            "err_ratio": max(row.err_ratio for file in self.winner_files for row in file.measured),
            "rule": slowdown,
        }


def open_engine_publication(sources: Sequence[Path]) -> EnginePublication | None:
    """The publication of runs whose winners are an engine's files, None if there is no such run. Raises InputError if
    the sources are not for one checkout."""
    engines = [engine_of_winners(source) for source in sources]
    if not any(engines):
        return None
    if len(set(engines)) > 1:
        titles = [PROJECTS[name].title if name else "AITER" for name in engines]
        named = [f"{path.name} ({title})" for path, title in zip(sources, titles, strict=True)]
        raise InputError(f"{', '.join(named)}: these are not for one checkout; publish each project's on their own")
    return EnginePublication(engines[0], list(dict.fromkeys(sources)))


def _text_of(change: FileChange, run: Path) -> str:
    """The text of a changed file. A new one names the Triton that it was tuned with, if others of its folder do, which
    are those of vLLM's experts: its look-up leaves that key out, and its reviewers ask for it (vllm#27740)."""
    devices = [slot.get("device") or {} for slot in provenance_of(run).get("devices") or []]
    versions = {device.get("triton") for device in devices}
    is_new = change.before is None and change.source == change.path
    if not is_new or len(versions) != 1 or None in versions:
        return change.after
    if not any('"triton_version"' in path.read_text() for path in change.path.parent.glob("*.json")):
        return change.after
    return json.dumps({"triton_version": versions.pop(), **json.loads(change.after)}, indent=4) + "\n"


def _tables_of(change: FileChange, file: str, measured: Mapping[FileLayer, list[MeasuredM]]) -> list[LayerTable]:
    """The tables of a changed file, one for each layer that was measured."""
    before = "shipped"
    if change.before is None:
        before = "default" if change.source == change.path else change.source.parent.name
    name = change.winner_file.path.name
    places = [winner.place for winner in change.winner_file.winners.values()]
    ranges = _describe_ranges(sorted((place.first, place.last) for place in places))
    return [LayerTable(file, layer, before, measured[name, layer], ranges) for layer in change.winner_file.layers]


def _describe_ranges(ranges: Sequence[tuple[int, int]]) -> str:
    """Ascending ranges of M as `1-20, 57-80`; those that follow each other as one."""
    joined: list[tuple[int, int]] = []
    for first, last in ranges:
        if joined and first == joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], last)
        else:
            joined.append((first, last))
    return ", ".join(f"{first}-{last}" if first < last else str(first) for first, last in joined)


def _decode_m(tables: Sequence[LayerTable]) -> int:
    """The largest M of a usual decode step at which a layer has a new config, else the largest M that has one."""
    changed = [row.m for table in tables for row in table.changed]
    return max((m for m in changed if m in DECODE_MS), default=max(changed))


def _rows_of(table: LayerTable) -> Iterator[dict[str, Any]]:
    """The rows of the command's document."""
    for row in table.rows:
        why = "no range with another config is worth it"
        if not row.is_kept:
            why = f"{max(row.changes, default=0.0):+.1%}"
        names = {"file": table.file, "layer": table.title, "M": row.m}
        yield {**names, "outcome": row.outcome, "why": why, "times": row.times}
