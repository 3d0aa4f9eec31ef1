"""vLLM as a project of config files: where its package or an override folder has them, and what it must answer.

All answers are the engine's own: its look-up runs in a fresh process for each set of questions. SGLang's files are
asked for in the same way, but only winners of SGLang's own kernel may change them.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from orchestrator.configs.aiter import Lookup, Trial, otherwise
from orchestrator.configs.journal import Journal
from orchestrator.configs.winners import Measured, Winner, WonFile, words
from orchestrator.errors import InputError
from worker.foreign.runner import ForeignCodeError
from worker.text import Finding, and_more
from worker.triton_configs.engine import OVERRIDE, Device, Engine, EngineError, Layer, ask, load, locate, unpack
from worker.triton_configs.keys import Segment, served, written
from worker.triton_configs.resolve import Bucket, Layout, indent_of

NAMES = {"vllm": "vLLM", "sglang": "SGLang"}
LAST_M = 16384
# names of one chip by different drivers, and the H200 that vLLM's MoE look-up takes for another
SPELLINGS = (
    ("AMD Instinct MI355X", "AMD Instinct MI355_OAM", "0x75b0"),
    ("AMD Instinct MI350X", "AMD Instinct MI350_OAM"),
    ("NVIDIA H200", "NVIDIA H200 NVL"),
)
T = TypeVar("T")


def journal_of(root: Path) -> Journal:
    """The journal of the merges into an engine's package or an override folder."""
    return Journal(root / "gemmfleet-merges.jsonl", root)


@contextmanager
def opened(
    into: Path, engine: Path | None
) -> Iterator[tuple[Path, Journal, Callable[[Sequence[WonFile]], EngineTree]]]:
    """(folder to write to, its journal, what makes a tree of it) for a merge; `engine`: the tree, installation or wheel
    that reads the override folder `into`. Raises InputError."""
    with tempfile.TemporaryDirectory(prefix="gemmfleet-engine-") as scratch:
        try:
            given = unpack(engine, Path(scratch)) if engine and engine.suffix == ".whl" else engine or into
            _, package, _ = locate(given.resolve())
        except EngineError as e:
            also = "" if engine else f"; if it is an override folder ({OVERRIDE}), name its vLLM with --engine"
            raise InputError(f"{e}{also}") from e
        if engine and (into / package.name).exists():
            raise InputError(f"--into {into}: holds an engine itself; leave out --engine, or name an override folder")
        root = into.resolve() if engine else package
        yield root, journal_of(root), lambda files: EngineTree(package, root, files)


class Facts(NamedTuple):
    """Facts of a layer by its engine. `target`: where it looks first; `found`: the file that it reads; `today`: ranges
    of M with what they get; `source`: hash of the kernel; `aliases`: the file's name on devices of other names."""

    target: Path
    found: Path | None
    today: list[Segment]
    source: str
    aliases: dict[str, str]


def about(root: Path, device: Device, others: Sequence[Device], layers: Sequence[Layer]) -> list[Facts]:
    """The facts of each layer in their order, asked in a fresh process."""
    aliases = {layer: {d.name: load(root, d).file_name(layer) for d in others} for layer in layers}
    engine = load(root, device)
    return [
        Facts(
            engine.folders(x)[0] / engine.file_name(x),
            engine.found(x),
            _today(engine, x),
            engine.source_hash(x.op),
            aliases[x],
        )
        for x in layers
    ]


def gives(root: Path, device: Device, calls: Sequence[tuple[Layer, int]]) -> list[Bucket]:
    """The config of each layer at an M, asked in a fresh process."""
    engine = load(root, device)
    return [engine.config(layer, m) for layer, m in calls]


class EngineTree:
    """The config files of an engine for a device."""

    def __init__(self, package: Path, root: Path, files: Sequence[WonFile]) -> None:
        """`root`: where files are written, the package or an override folder. Raises InputError if the engine cannot
        be asked."""
        self.package, self.root, self.device = package, root, files[0].place.device
        self.project, _, version = locate(package)
        self.name = f"{NAMES[self.project]} {version}"
        self.notes, self._planned = list[str](), dict[Path, tuple[list[Segment], list[Segment]]]()
        names = [name for names in SPELLINGS if self.device.name in names for name in names]
        others = [Device(name, self.device.arch) for name in names if name != self.device.name]
        layers = list(dict.fromkeys(x for f in files for x in _layers(f.rows)))
        self._facts = dict(zip(layers, self._ask(about, others, layers, answers=len(layers)), strict=True))

    def lay_out(self, won: WonFile) -> Layout:
        """The file that holds winners, with its text. Raises ValueError."""
        layers, (project, version, source) = _layers(won.rows), won.place.made
        target, found, old, here, _ = self._facts[layers[0]]
        for wrong, why in (
            (project != self.project and source != here,
             f"not tuned for {self.name}: {NAMES.get(project)}'s kernel is another"),
            (project == self.project and target.name != won.path.name,
             f"{self.name} looks for {target.name}; tune again with it"),
            (not target.is_relative_to(self.root),
             f"{self.name} reads it from {target.parent} alone: give that package"),
            (any(self._facts[x].today != old for x in layers),
             "its models get different configs today: tune one alone"),
        ):  # fmt: skip
            if wrong:
                raise ValueError(why)
        ranges = [(p.first, p.last, w.values, p.key) for w in won.winners.values() for p in [w.place]]
        there_already = all(
            s[2] == r[2] for r in ranges for s in old if s[0] <= r[1] and (s[1] is None or r[0] <= s[1])
        )
        new = old if there_already else merged(old, ranges)
        self._planned[target] = old, new
        self.notes += [
            *[f"{target.name}: measured with the kernel of {version}; {self.name} has another file"] * (source != here),
            *(f"{target.name}: {bucket} was not measured for {words(x)}"
              for x in layers for bucket, w in won.winners.items() if not _measured(w, x)),
        ]  # fmt: skip
        text = found.read_text() if found else ""
        head = {k: v for k, v in json.loads(text or "{}").items() if not k.isdigit()}  # triton_version
        entries = {str(k): v for k, v in written(new).items()}
        after = json.dumps(head | entries, indent=indent_of(text)) + "\n" * (not text or text.endswith("\n"))
        return Layout(found or target, target, _buckets(old), _buckets(new), after)

    def check(self, won: WonFile, layout: Layout) -> Iterator[Finding]:
        """Ranges that were not measured at both ends, by a layer that was measured there."""
        for name, w in won.winners.items():
            missing = {m for x in _layers(w.measured) for m in {w.place.first, w.place.last} - _measured(w, x)}
            for m in sorted(missing):
                yield Finding("error", "end", str(layout.target), 0, f"was not measured at M={m}, its end", name)

    def bucket_for(self, won: WonFile, buckets: Mapping[str, Bucket], m: int) -> str:
        """The range that holds an M."""
        return [name for name in buckets if int(name[2:].partition("-")[0]) <= m][-1]

    def readers(self, won: WonFile) -> tuple[str, ...]:
        """Other models and devices that read the file."""
        layers = _layers(won.rows)
        others = [name for name, file in self._facts[layers[0]].aliases.items() if file == won.path.name]
        models = f"every model with its E and N (measured: {', '.join(map(words, layers))})"
        return (*[models] * bool(layers[0].e), *others)

    def lookups(self, changes: Sequence[tuple[WonFile, Path, str]]) -> list[Lookup]:
        """Answers that the engine must give, and gives as they are now: at both ends of all ranges of the changed
        files, as read and as planned. The other files are noted, as they must stay."""
        out, away = list[Lookup](), dict[str, list[str]]()
        for won, path, _ in changes:
            layers, (old, new) = _layers(won.rows), self._planned[path]
            spans = [*(s[:2] for s in (*old, *new)), *served(written(new)).values()]
            ends = {m for first, last in spans for m in (first, last or LAST_M)}
            out += [((x, m), _of(old, m)[2], _of(new, m)[2]) for x in layers for m in sorted(ends)]
            for device, name in self._facts[layers[0]].aliases.items():
                away.setdefault(device, []).extend({name} - {path.name})
        self.notes += [
            f"where the driver says {device!r}, vLLM looks for {and_more(names, 1)}, which this merge does not write"
            for device, names in away.items()
            if names
        ]
        changed = {path for _, path, _ in changes}
        self._beside = {p: p.read_bytes() for c in changed for p in c.parent.glob("*.json") if p not in changed}
        self.prove(out, after=False)
        return out

    def prove(self, some: Sequence[Lookup], *, after: bool = True) -> Trial:
        """The engine's look-up, in a fresh process, gives what it must. Raises InputError where it does not."""
        said = self._ask(gives, [call for call, _, _ in some], answers=len(some))
        for ((layer, m), now, then), values in zip(some, said, strict=True):
            if values != (then if after else now):
                raise otherwise(self.root, f"{NAMES[self.project]}'s look-up", after, f"M={m} {words(layer)}", values)
        if faults := [f"{p}: was changed meanwhile" for p, text in self._beside.items() if p.read_bytes() != text]:
            raise InputError(faults)
        return Trial(how=f"the look-up of {self.name}", notes=tuple(self.notes))

    def _ask(self, question: Callable[..., list[T]], *args: Any, answers: int) -> list[T]:
        """The answers of a fresh process. Raises InputError."""
        env = {OVERRIDE: str(self.root)} if self.root != self.package else {}
        try:
            given = ask(env, question, self.package, self.device, *args)
        except (EngineError, ForeignCodeError, OSError) as e:
            raise InputError(f"{self.package}: {e}") from e
        if len(given) != answers:
            raise InputError(f"{self.package}: gave {len(given)} answers to {answers} questions")
        return given


def _today(engine: Engine, layer: Layer) -> list[Segment]:
    """Ranges of M with what they get, an entry of the file or the engine's default.

    vLLM's default may change at any M up to 1024, and at multiples of 16 or of the experts. Where another version's
    changes elsewhere, the proof finds out.
    """
    if table := engine.table(layer):
        return [(first, last, table[key], key) for key, (first, last) in served(table).items()]
    steps = {*range(16, LAST_M + 1, 16), *(layer.e * i for i in range(1, 257) if layer.e)}
    asked = sorted({*range(1, 1025), *steps, *(m - 1 for m in steps)})
    values = {m: engine.config(layer, m) for m in asked}
    before = [None, *values.values()]
    return _ranges({m: (v, m) for (m, v), was in zip(values.items(), before, strict=False) if v != was})


def merged(old: Sequence[Segment], won: Sequence[Segment]) -> list[Segment]:
    """Today's ranges, with winners in their place."""
    starts = {s[0] for s in (*old, *won)} | {s[1] + 1 for s in won if s[1]}
    inside = {m for m in starts for s in won if s[1] and s[0] < m <= s[1]}
    return _ranges({m: _of([*won, *old], m)[2:] for m in sorted(starts - inside)})


def _ranges(starts: Mapping[int, tuple[Any, int]]) -> list[Segment]:
    lasts = [*(m - 1 for m in [*starts][1:]), None]
    return [(first, last, *of) for (first, of), last in zip(starts.items(), lasts, strict=True)]


def _of(ranges: Sequence[Segment], m: int) -> Segment:
    return next(s for s in ranges if s[0] <= m and (s[1] is None or m <= s[1]))


def _buckets(ranges: Sequence[Segment]) -> dict[str, Bucket]:
    return {f"M={first}-{last or ''}": values for first, last, values, _ in ranges}


def _layers(rows: Sequence[Measured]) -> list[Layer]:
    return list(dict.fromkeys(r.layer for r in rows if r.layer))


def _measured(winner: Winner, layer: Layer) -> set[int]:
    return {r.m for r in winner.measured if r.layer == layer}
