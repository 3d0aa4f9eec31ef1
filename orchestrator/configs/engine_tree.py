"""vLLM and SGLang as projects of config files: where a package or override folder has them, and what it must answer.

`EngineTree` is the `ConfigTree` that a merge works with (`config_tree.py` has the order of its calls). All answers are
the engine's own: its look-up runs in a fresh process for each set of questions (`engine_facts.py`). SGLang has a file
of each product of experts, which are read, planned and proven as one. `engine_check.py` checks files that are there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from orchestrator.configs.bucket_decision import layers_of
from orchestrator.configs.config_tree import FileChange, LookupProof, PlannedLookup, compare_answers
from orchestrator.configs.engine_facts import LAST_M, FilePaths, LayerFacts, configs_at, layer_facts
from orchestrator.configs.winners import WinnerFile
from orchestrator.errors import InputError
from orchestrator.files.scratch import scratch_folder
from worker.foreign.runner import ForeignCodeError
from worker.text import and_more
from worker.triton_configs.config_file import Bucket, json_in_form_of
from worker.triton_configs.engine_package import (
    OVERRIDE,
    PROJECTS,
    EngineDevice,
    EnginePackage,
    ServingEngineError,
    locate_engine,
    unpack_wheel,
)
from worker.triton_configs.m_ranges import (
    ConfigRange,
    MRange,
    entries_of,
    merge_ranges,
    range_at,
    ranges_served,
)
from worker.triton_configs.pair import needs_down_file, split_entries
from worker.triton_configs.serving_engine import ask_engine
from worker.triton_configs.tree_files import FilePlan, FileText

DEVICE_SPELLINGS = (
    ("AMD Instinct MI355X", "AMD Instinct MI355_OAM", "0x75b0"),
    ("AMD Instinct MI350X", "AMD Instinct MI350_OAM"),
    ("NVIDIA H200", "NVIDIA H200 NVL"),
)
"""Names of one chip by different drivers, and the H200 that vLLM's MoE look-up takes for another."""
T = TypeVar("T")


class EngineTarget(NamedTuple):
    """The engine's package, and the folder that a merge writes to, which is the package or an override folder that it
    reads."""

    package: EnginePackage
    root: Path


@contextmanager
def open_target(into: Path, engine: Path | None) -> Iterator[EngineTarget]:
    """The target of a merge into a folder; `engine`: the tree, installation or wheel that reads the override folder
    `into`. A wheel is unpacked for as long as the block lasts. Raises InputError."""
    with scratch_folder("gemmfleet-engine-") as scratch:
        engine_root = engine or into
        try:
            if engine and engine.suffix == ".whl":
                engine_root = unpack_wheel(engine, scratch)
            package = locate_engine(engine_root.resolve())
        except ServingEngineError as e:
            hint = "" if engine else f"; if it is an override folder ({OVERRIDE}), name its vLLM with --engine"
            raise InputError(f"{e}{hint}") from e
        if engine and (into / package.project).exists():
            raise InputError(f"--into {into}: holds an engine itself; leave out --engine, or name an override folder")
        if engine and package.project == "sglang" and into.is_dir() and not (into / "configs").is_dir():
            raise InputError(f"--into {into}: SGLang reads {into / 'configs'}, which does not exist: make it first")
        yield EngineTarget(package, into.resolve() if engine else package.folder)


def _buckets(ranges: Sequence[ConfigRange]) -> dict[str, Bucket]:
    """The configs by the names of their ranges: `M=57-80`, `M=81-`."""
    return {f"M={part.first}-{part.last or ''}": part.values for part in ranges}


class EngineTree:
    """The config files of an engine for a device."""

    def __init__(self, target: EngineTarget, files: Sequence[WinnerFile]) -> None:
        """`files`: all winners of one device. Raises InputError if the engine cannot be asked."""
        self.package, self.root = target
        self.device = files[0].place.device
        self.title = PROJECTS[self.package.project].title
        self.name = f"{self.title} {self.package.version}".strip()  # a checkout has no version
        self.notes: list[str] = []
        # ranges before and after, by the file of winners
        self._planned: dict[Path, tuple[list[ConfigRange], list[ConfigRange]]] = {}
        self._files_beside: dict[Path, bytes] = {}
        layers = list(dict.fromkeys(layer for file in files for layer in file.layers))
        facts = self._ask(layer_facts, _other_spellings(self.device), layers, answers=len(layers))
        self._facts = dict(zip(layers, facts, strict=True))

    def plan_file(self, winner_file: WinnerFile) -> FilePlan:
        """The file that holds winners, with its text. Raises ValueError."""
        layers = winner_file.layers
        facts = self._facts[layers[0]]
        self._check_fits(winner_file, facts)
        ranges: list[ConfigRange] = []
        for winner in winner_file.winners.values():
            ranges.append(ConfigRange(winner.place.first, winner.place.last, winner.values, winner.place.key))
        old = facts.today
        new = old if _all_hold(old, ranges) else merge_ranges(old, ranges)
        self._planned[winner_file.path] = old, new
        self._note_gaps(winner_file, facts)
        up_entries, down_entries = split_entries(entries_of(new))
        beside = None
        if facts.down_file and (facts.down_file.read or any(needs_down_file(part.values) for part in new)):
            # both files have the same keys, so that every M gets both entries of one config
            beside = _file_with_entries(facts.down_file, down_entries)
        return FilePlan(_file_with_entries(facts.file, up_entries), _buckets(old), _buckets(new), beside)

    def _check_fits(self, winner_file: WinnerFile, facts: LayerFacts) -> None:
        """Raises ValueError if the winners are not for the file that this engine reads, or not for it alone."""
        measured = winner_file.place.engine
        is_of_project = measured.project == self.package.project
        if not is_of_project and measured.source != facts.source:
            title = PROJECTS[measured.project].title if measured.project in PROJECTS else measured.project
            raise ValueError(f"not tuned for {self.name}: {title}'s kernel is another")
        if is_of_project and facts.file.target.name != winner_file.path.name:
            raise ValueError(f"{self.name} looks for {facts.file.target.name}; tune again with it")
        if not facts.file.target.is_relative_to(self.root):
            raise ValueError(f"{self.name} reads it from {facts.file.target.parent} alone: give that package")
        if re.search(r"[^\d.]", self.device.triton):
            text = f"a folder for Triton {self.device.triton} would break SGLang's look-up, which takes numbers there"
            raise ValueError(f"{text}; tune with a release of Triton")
        if any(self._facts[layer].today != facts.today for layer in winner_file.layers):
            raise ValueError("its models get different configs today: tune one alone")

    def _note_gaps(self, winner_file: WinnerFile, facts: LayerFacts) -> None:
        """Notes on another kernel file, and on layers for which a range was not measured."""
        file_name = facts.file.target.name
        measured = winner_file.place.engine
        if measured.source != facts.source:
            self.notes.append(
                f"{file_name}: measured with the kernel of {measured.version}; {self.name} has another file"
            )
        for layer in winner_file.layers:
            for bucket, winner in winner_file.winners.items():
                if layer not in layers_of(winner.measured):
                    self.notes.append(f"{file_name}: {bucket} was not measured for {layer.sizes_in_words}")

    def faults(self, winner_file: WinnerFile, plan: FilePlan) -> Iterator[str]:
        """Ranges that were not measured at both ends, by a layer that was measured there."""
        for name, winner in winner_file.winners.items():
            missing: set[int] = set()
            for layer in layers_of(winner.measured):
                measured_ms = {row.m for row in winner.measured if row.layer == layer}
                missing |= {winner.place.first, winner.place.last} - measured_ms
            for m in sorted(missing):
                yield f"{plan.file.target.name}: {name}: was not measured at M={m}, its end"

    def bucket_for(self, winner_file: WinnerFile, buckets: Mapping[str, Bucket], m: int) -> str:
        """The range that holds an M."""
        return [name for name in buckets if int(name[2:].partition("-")[0]) <= m][-1]

    def readers(self, winner_file: WinnerFile) -> tuple[str, ...]:
        """Other models and devices that read the file."""
        layers = winner_file.layers
        readers: list[str] = []
        if layers[0].op == "moe":
            measured = ", ".join(layer.sizes_in_words for layer in layers)
            readers.append(f"every model with its E and N (measured: {measured})")
        readers += [name for name, file in self._facts[layers[0]].aliases.items() if file == winner_file.path.name]
        return tuple(readers)

    def planned_lookups(self, changes: Sequence[FileChange]) -> list[PlannedLookup]:
        """Answers that the engine must give, and gives as they are now: at both ends of all ranges of the changed
        files, as read and as planned. The other files are noted, as they must stay."""
        lookups: list[PlannedLookup] = []
        winner_files = {change.winner_file.path: change.winner_file for change in changes}
        for path, winner_file in winner_files.items():
            old, new = self._planned[path]
            ranges: list[ConfigRange | MRange] = [*old, *new, *ranges_served(entries_of(new)).values()]
            ends = {part.first for part in ranges} | {part.last or LAST_M for part in ranges}
            for layer in winner_file.layers:
                for m in sorted(ends):
                    name = f"M={m} {layer.sizes_in_words}"
                    before = range_at(old, m).values
                    lookups.append(PlannedLookup(name, (layer, m), before, range_at(new, m).values))
        self._note_aliases(list(winner_files.values()))
        changed = {change.path for change in changes}
        for folder in {path.parent for path in changed}:
            for path in folder.glob("*.json"):
                if path not in changed:
                    self._files_beside[path] = path.read_bytes()
        self.prove(lookups, after=False)
        return lookups

    def _note_aliases(self, winner_files: Sequence[WinnerFile]) -> None:
        """Notes on devices of the same chip whose driver names them in another way: they look for other files."""
        unwritten: dict[str, list[str]] = {}
        for winner_file in winner_files:
            for device, name in self._facts[winner_file.layers[0]].aliases.items():
                if name != winner_file.path.name:
                    unwritten.setdefault(device, []).append(name)
        for device, names in unwritten.items():
            files = and_more(names, 1)
            self.notes.append(f"where the driver says {device!r}, {self.title} looks for {files}: not written here")

    def prove(self, lookups: Sequence[PlannedLookup], *, after: bool = True) -> LookupProof:
        """The engine's look-up, in a fresh process, gives what it must. Raises InputError where it does not."""
        answers = self._ask(configs_at, [lookup.call for lookup in lookups], answers=len(lookups))
        compare_answers(self.root, f"{self.title}'s look-up", lookups, answers, after=after)
        changed = [path for path, content in self._files_beside.items() if path.read_bytes() != content]
        if changed:
            raise InputError([f"{path}: was changed meanwhile" for path in changed])
        return LookupProof(f"the look-up of {self.name}", self.notes)

    def _ask(self, question: Callable[..., list[T]], *args: Any, answers: int) -> list[T]:
        """The answers of a fresh process. Raises InputError."""
        folder = self.package.folder
        env: dict[str, str] = {}
        if self.root != folder:
            env[PROJECTS[self.package.project].override] = str(self.root)
        try:
            received = ask_engine(env, question, folder, self.device, *args)
        except (ServingEngineError, ForeignCodeError, OSError) as e:
            raise InputError(f"{folder}: {e}") from e
        if len(received) != answers:
            raise InputError(f"{folder}: gave {len(received)} answers to {answers} questions")
        return received


def _other_spellings(device: EngineDevice) -> list[EngineDevice]:
    """The device under the other names that drivers give to its chip."""
    others: list[EngineDevice] = []
    for names in DEVICE_SPELLINGS:
        if device.name in names:
            others += [EngineDevice(name, device.arch) for name in names if name != device.name]
    return others


def _all_hold(old: Sequence[ConfigRange], winner_ranges: Sequence[ConfigRange]) -> bool:
    """True if today's ranges have the winners' values already, wherever they meet."""
    for winner in winner_ranges:
        for part in old:
            meets = part.first <= (winner.last or LAST_M) and (part.last is None or winner.first <= part.last)
            if meets and part.values != winner.values:
                return False
    return True


def _file_with_entries(paths: FilePaths, entries: Mapping[int, Bucket]) -> FileText:
    """A file, or a new one, with other entries; keys that are no M (triton_version) stay, first."""
    text = paths.read.read_text() if paths.read else ""
    document: dict[str, Any] = {}
    for key, value in json.loads(text or "{}").items():
        if not key.isdigit():
            document[key] = value
    for key, values in entries.items():
        document[str(key)] = values
    return FileText(paths.read or paths.target, paths.target, json_in_form_of(text, document))
