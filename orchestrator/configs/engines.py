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
from typing import Any

from orchestrator.configs.aiter import Trial, otherwise
from orchestrator.configs.journal import Journal
from orchestrator.configs.winners import Point, Winner, WonFile, words
from orchestrator.errors import InputError
from worker.text import Finding, and_more
from worker.triton_configs.ask import Call, ask
from worker.triton_configs.engine import Device, EngineError, Layer, locate, unpack
from worker.triton_configs.keys import Segment, served, written
from worker.triton_configs.resolve import Bucket, Layout, indent_of

OVERRIDE = "VLLM_TUNED_CONFIG_FOLDER"
NAMES = {"vllm": "vLLM", "sglang": "SGLang"}
FACTS = ("file_name", "folders", "found", "table", "source_hash")
LAST_M = 16384
Opened = tuple[Path, Journal, "Callable[[Sequence[WonFile]], EngineTree]"]
# names of one chip by different drivers, and the H200 that vLLM's MoE look-up takes for another
SPELLINGS = (
    ("AMD Instinct MI355X", "AMD Instinct MI355_OAM", "0x75b0"),
    ("AMD Instinct MI350X", "AMD Instinct MI350_OAM"),
    ("NVIDIA H200", "NVIDIA H200 NVL"),
)
# a question, and its answers before and after a merge
Lookup = tuple[Call, Bucket, Bucket]


def journal_of(root: Path) -> Journal:
    """The journal of the merges into an engine's package or an override folder."""
    return Journal(root / "gemmfleet-merges.jsonl", root)


@contextmanager
def opened(into: Path, engine: Path | None) -> Iterator[Opened]:
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


class EngineTree:
    """The config files of an engine for a device."""

    def __init__(self, package: Path, root: Path, files: Sequence[WonFile]) -> None:
        """`root`: where files are written, the package or an override folder. Raises InputError if the engine cannot
        be asked."""
        self.package, self.root, self.device = package, root, _points(files[0])[0].place.device
        self.project, _, self.version = locate(package)
        self.notes, self._planned = list[str](), dict[Path, tuple[list[Segment], list[Segment]]]()
        layers = dict.fromkeys(layer for f in files for layer in _layers(f))
        names = [name for names in SPELLINGS if self.device.name in names for name in names]
        self._others = [Device(name, self.device.arch) for name in names if name != self.device.name]
        calls = [Call(self.device, do, layer) for layer in layers for do in FACTS]
        self._said = self._ask([*calls, *(Call(d, "file_name", layer) for layer in layers for d in self._others)])
        no_file = [layer for layer in layers if not self._fact("table", layer)]
        self._said |= self._ask([Call(self.device, "config", x, m) for x in no_file for m in _where_defaults_change(x)])

    def lay_out(self, won: WonFile) -> Layout:
        """The file that holds winners, with its text. Raises ValueError."""
        layers, (project, version, source) = _layers(won), _points(won)[0].place.made
        there, name = f"{NAMES[self.project]} {self.version}", self._fact("file_name", layers[0])
        folder, found = Path(self._fact("folders", layers[0])[0]), self._fact("found", layers[0])
        old, other = self._today(layers[0]), self._fact("source_hash", layers[0]) != source
        for wrong, why in (
            (project != self.project and other, f"not tuned for {there}: {NAMES.get(project)}'s kernel is another"),
            (project == self.project and name != won.path.name, f"{there} looks for {name}; tune again with it"),
            (not folder.is_relative_to(self.root), f"{there} reads it from {folder} alone: give that package"),
            (any(self._today(x) != old for x in layers), "its models get different configs today: tune one alone"),
        ):  # fmt: skip
            if wrong:
                raise ValueError(why)
        target, text = folder / name, Path(found).read_text() if found else ""
        ranges = [
            (p.first, p.last, w.values, p.key) for w in won.winners.values() for p in {r.place for r in _points(w)}
        ]
        there_already = all(
            s[2] == r[2] for r in ranges for s in old if s[0] <= r[1] and (s[1] is None or r[0] <= s[1])
        )
        new = old if there_already else merged(old, ranges)
        self._planned[target] = old, new
        self.notes += [
            *[f"{name}: measured with the kernel of {version}; {self.version} has another file"] * other,
            *(f"{name}: {bucket} was not measured for {words(x)}"
              for x in layers for bucket, w in won.winners.items() if not _measured(w, x)),
        ]  # fmt: skip
        head = {k: v for k, v in json.loads(text or "{}").items() if not k.isdigit()}  # triton_version
        entries = {str(k): v for k, v in written(new).items()}
        after = json.dumps(head | entries, indent=indent_of(text)) + "\n" * (not text or text.endswith("\n"))
        return Layout(Path(found or target), target, _buckets(old), _buckets(new), after)

    def check(self, won: WonFile, layout: Layout) -> Iterator[Finding]:
        """Ranges that were not measured at both ends, by a layer that was measured there."""
        for name, winner in won.winners.items():
            place = _points(winner)[0].place
            missing = {m for x in _layers(winner) for m in {place.first, place.last} - _measured(winner, x)}
            for m in sorted(missing):
                yield Finding("error", "end", str(layout.target), 0, f"was not measured at M={m}, its end", name)

    def bucket_for(self, won: WonFile, buckets: Mapping[str, Bucket], m: int) -> str:
        """The range that holds an M."""
        return [name for name in buckets if int(name[2:].partition("-")[0]) <= m][-1]

    def readers(self, won: WonFile) -> tuple[str, ...]:
        """Other models and devices that read the file."""
        layers = _layers(won)
        others = [d.name for d in self._others if self._fact("file_name", layers[0], d) == won.path.name]
        models = f"every model with its E and N (measured: {', '.join(map(words, layers))})"
        return (*[models] * bool(layers[0].e), *others)

    def lookups(self, changes: Sequence[tuple[WonFile, Path, str]]) -> list[Lookup]:
        """Answers that the engine must give: around all ends and keys of the changed files as planned. The other files
        are noted, as they must stay."""
        out = list[Lookup]()
        for won, path, _ in changes:
            old, new = self._planned[path]
            ends = {m for s in (*old, *new) for m in (s[0], s[1] or LAST_M)} | {*written(new)}
            ends |= {m for of in served(written(new)).values() for m in of if m}
            around = sorted({m + d for m in ends for d in (-1, 0, 1)} - {0})
            calls = [Call(self.device, "config", x, m) for x in _layers(won) for m in around]
            out += [(call, _of(old, call.m)[2], _of(new, call.m)[2]) for call in calls]
        changed = {path: _layers(won)[0] for won, path, _ in changes}
        self.notes += [
            f"where the driver says {d.name!r}, vLLM looks for {and_more(away, 1)}, which this merge does not write"
            for d in self._others
            if (away := [n for p, x in changed.items() if (n := self._fact("file_name", x, d)) != p.name])
        ]
        self._beside = {p: p.read_bytes() for c in changed for p in c.parent.glob("*.json") if p not in changed}
        return out

    def prove(self, some: Sequence[Lookup], *, after: bool) -> Trial:
        """The engine's look-up, in a fresh process, gives what it must. Raises InputError where it does not."""
        name, said = NAMES[self.project], self._ask([call for call, _, _ in some])
        for call, now, then in some:
            if said[call] != (then if after else now):
                shape = f"M={call.m} {words(call.layer)}"
                raise otherwise(self.root, f"{name}'s look-up", after, shape, said[call])
        if faults := [f"{p}: was changed meanwhile" for p, text in self._beside.items() if p.read_bytes() != text]:
            raise InputError(faults)
        return Trial(how=f"the look-up of {name} {self.version}", notes=tuple(self.notes))

    def _today(self, layer: Layer) -> list[Segment]:
        """Ranges of M with what they get, an entry of the file or the engine's default."""
        if table := self._fact("table", layer):
            return [(first, last, table[key], key) for key, (first, last) in served(table).items()]
        values = {m: self._said[Call(self.device, "config", layer, m)] for m in _where_defaults_change(layer)}
        before = [None, *values.values()]
        return _ranges({m: (v, m) for (m, v), was in zip(values.items(), before, strict=False) if v != was})

    def _fact(self, do: str, layer: Layer, device: Device | None = None) -> Any:
        return self._said[Call(device or self.device, do, layer)]

    def _ask(self, calls: Sequence[Call]) -> dict[Call, Any]:
        """Answers of a fresh process. Raises InputError if one is missing."""
        env = {OVERRIDE: str(self.root)} if self.root != self.package else {}
        try:
            answers = ask(self.package, calls, env) if calls else []
        except EngineError as e:
            raise InputError(str(e)) from e
        said = dict(zip(calls, answers, strict=True))
        if faults := [f"{self.package}: {words(c.layer)}: {a}" for c, a in said.items() if isinstance(a, EngineError)]:
            raise InputError(faults)
        return said


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


def _points(won: WonFile | Winner) -> list[Point]:
    return [r for r in (won.rows if isinstance(won, WonFile) else won.measured) if isinstance(r, Point)]


def _layers(won: WonFile | Winner) -> list[Layer]:
    return list(dict.fromkeys(r.layer for r in _points(won)))


def _measured(winner: Winner, layer: Layer) -> set[int]:
    return {r.m for r in _points(winner) if r.layer == layer}


def _where_defaults_change(layer: Layer) -> list[int]:
    """M at which vLLM's default may change: any up to 1024, multiples of 16 or of the experts. Where another version's
    changes elsewhere, `prove` finds out."""
    steps = {*range(16, LAST_M + 1, 16), *(layer.e * i for i in range(1, 257) if layer.e)}
    return sorted({*range(1, 1025), *steps, *(m - 1 for m in steps if m > 1)})
