"""Shapes without a tuned row, counted from the log of a workload, most frequent first.

    shape M:16, N:1280, K:8192 not found tuned config in a8w8_tuned_gemm.csv, will use default config!

`count_misses` reads logs line by line, plain or gzip; `shapes from-log` and `shapes capture` call it. `read_line` makes
a `Miss` of a line, and `Misses` counts them by family and key. Lines of vLLM, SGLang and PyTorch are read by
`engine_log.py`.

Sources (ROCm/aiter, v0.1.5 to e4048607a5): `get_GEMM_config` and its like in aiter/ops/gemm_op_a4w4.py,
gemm_op_a8w8.py and batched_gemm_op_*.py, `get_GEMM_A16W16_config` and its forerunner in aiter/tuned_gemm.py,
`get_2stage_cfgs` in aiter/fused_moe.py, `lookup_mxscale_bmm_config` in batched_gemm_op_a8w8.py. Newer versions log a
shape once a process, for the lookup is cached.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import stat
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path, PurePosixPath
from typing import IO

from orchestrator.errors import InputError
from orchestrator.families import get_family
from orchestrator.files.faults import escaped
from orchestrator.files.read import read_head
from orchestrator.shapes.engine_log import read_engine_line, read_tunableop
from orchestrator.shapes.model import COUNT, Key, numbers
from orchestrator.shapes.reader import CellError, CellReader, Notes, read_shapes
from orchestrator.tables.table_names import family_in_name
from worker.families import FAMILIES, Column, Family
from worker.text import plural

MARKS = (b"not found tuned", b"[fused_moe] using", b" solution:", b"onfig file not found at", b"TunableOp_")
"""A line without any of these says nothing of interest."""
_RECORD = re.compile(
    r"(?=shape (?:is )?[BM]:\d|[Cc]onfig file not found at|\[fused_moe\] using|using torch solution:0)"
)
"""The beginning of a record. Workers that share a terminal write several on a line."""
CUT = "a record that was cut off in the middle"
_MISS = re.compile(
    r"shape (?:is )?(?:B:(?P<B>\d+), ?)?M:(?P<M>\d+), ?N:(?P<N>\d+), ?K:(?P<K>\d+)(?P<more>.{0,400}?)"
    r"not found tuned(?P<padded>/padded)? config in (?P<where>.{1,1000}?), (?:will use default config|the caller will)"
)
_OTHER = re.compile(r"not found tuned(?:/padded)? config")
_USING = re.compile(
    r"using torch solution:0 for (?P<case>[mM])=(?P<M>\d+) [nN]=(?P<N>\d+) [kK]=(?P<K>\d+) (?P<more>.{0,200})"
)
_FMOE = re.compile(r"\[fused_moe\] using [12]stage(?: xbf16)? default for \((?P<keys>[^()]{1,800})\)")
_DETAIL = re.compile(r"\b(q_dtype_w|dtype|otype|bias|scaleAB|bpreshuffle)[:=] ?'?(torch\.\w+|True|False)\b")
_COLUMN = {"otype": "outdtype"}
MXSCALE = "batched_gemm_a8w8_blockscale_mxscale"
"""The one family whose line has a form of its own."""
_FMOE_CELL = re.compile(r"'([^']{0,80})'|<(ActivationType\.\w+)[^<>]{0,20}>|([\w.]{1,80})")


@dataclass(frozen=True, slots=True)
class Miss:
    """A shape that AITER had no row for. `family` "": the line does not name it. `values`: key columns that it names;
    without M in a line about a config file of an engine, which serves every M.

    `bare`: a line of late 2025 without the columns that the line after it has (`details_follow`).
    """

    family: str
    values: Mapping[str, str]
    bare: bool = False
    details_follow: bool = False


def read_line(line: str) -> Miss | None:
    """The miss that a log line, or one record of it, speaks of. Raises ValueError where it speaks of one that cannot be
    read, or of what gemmfleet does not tune."""
    if "onfig file not found at" in line:
        return Miss(*read_engine_line(line))
    if "TunableOp_" in line:
        untuned = read_tunableop(line)
        return Miss(*untuned) if untuned else None
    if "not found tuned" in line:
        return _read_gemm(line)
    if line.startswith("shape ") and "tuned" not in line and "solution" not in line:
        raise ValueError(CUT)
    if "[fused_moe]" in line:
        return _read_fmoe(line)
    if used := _USING.search(line):
        values = {name: used[name] for name in ("M", "N", "K")}
        return Miss("a16w16", {**values, **_read_types(used["more"])}, details_follow=used["case"] == "M")
    return None


def _read_gemm(line: str) -> Miss | None:
    """`shape M:16, N:1280, K:8192 [types] not found tuned config in TABLE, will use default config!`"""
    match = _MISS.search(line)
    if match is None:
        if _OTHER.search(line):
            raise ValueError("a family that gemmfleet does not know, or a line that was cut")
        return None
    values = {name: match[name] for name in ("B", "M", "N", "K") if match[name]}
    types = _read_types(match["more"])
    family = MXSCALE if match["padded"] else _family_of(match["where"].strip(), values, types, match["more"])
    return Miss(family, {**values, **types}, bare=family == "a16w16" and not types)


def _read_types(text: str) -> dict[str, str]:
    """The key columns that a line names as `dtype=torch.bfloat16`."""
    return {_COLUMN.get(name, name): value for name, value in _DETAIL.findall(text)}


def _family_of(table: str, values: Mapping[str, str], types: Mapping[str, str], more: str) -> str:
    """The family by the table's name; where the user named it otherwise, by the rest of the line. "": not known."""
    if "B" in values:
        return "batched_bf16" if "dtype is bf16" in more else "batched_a8w8"
    family = family_in_name(PurePosixPath(table).name)
    if family:
        return family.name
    if table == "CKGEMM or asmGEMM":
        return "a4w4_blockscale"
    return "a16w16" if "dtype" in types else ""


def _read_fmoe(line: str) -> Miss | None:
    """`[fused_moe] using 2stage default for (256, 16, 4096, 1536, 128, 8, 'ActivationType.Silu', ...)`: cu_num, then
    the key. Some versions have the gfx before it."""
    match = _FMOE.search(line)
    if match is None:
        if "default for (" in line:
            raise ValueError(CUT)
        return None
    cells = ["".join(groups) for groups in _FMOE_CELL.findall(match["keys"])]
    if cells and cells[0].startswith("gfx"):
        cells = cells[1:]
    family = FAMILIES["fmoe"]
    if len(cells) != 1 + len(family.key_names):
        raise ValueError("a mixture of experts of another kind than fmoe, or a line that was cut")
    values = dict(zip(family.key_names, cells[1:], strict=True))
    for name in ("use_g1u1", "doweight_stage1"):
        values[name] = {"True": "1", "False": "0"}.get(values[name], values[name])
    if values["q_dtype_w"] == "torch.uint32":  # as AITER's own list writes it
        values["q_dtype_w"] = "torch.int4"
    return Miss("fmoe", values)


@cache
def _readers(family: str) -> list[tuple[Column, CellReader]]:
    notes = Notes()
    limits = FAMILIES[family].limits
    return [(column, CellReader(column, limits, notes)) for column in FAMILIES[family].columns]


def key_of(miss: Miss, family: str) -> Key:
    """The key of a family's miss, each cell checked as in a shapes file. Raises ValueError where a cell is not legal or
    a required column is missing."""
    key: list[int | str] = []
    for column, reader in _readers(family):
        cell = miss.values.get(column.name, column.default)
        if cell is None:
            raise ValueError(f"{column.name} is missing")
        try:
            key.append(reader.read(cell, 0))
        except CellError as e:
            raise ValueError(f"{column.name}: {e}") from e
    return tuple(key)


MAX_LINE = 64 * 1024
MAX_SHAPES = 1_000_000
"""The largest number of distinct shapes in a log: it may come from a node, which must not fill our memory."""


@dataclass(slots=True)
class Misses:
    """The misses of logs, counted line by line. Call `read` for each line, then `close`, and `add_files` last."""

    family: str | None = None
    """The family of lines that do not name one."""
    counts: dict[str, Counter[Key]] = field(default_factory=dict)
    """By family, each key with its number of lines, first seen first."""
    lines: int = 0
    unknown: int = 0
    """Lines whose family is not known."""
    odd: Counter[str] = field(default_factory=Counter)
    """Lines that could not be read, or name what gemmfleet does not tune, by reason."""
    files: Counter[tuple[str, tuple[tuple[str, str], ...]]] = field(default_factory=Counter)
    """Lines about each config file that an engine did not find: (family, key columns without M). `add_files` makes
    shapes of them."""
    repeats: Counter[str] = field(default_factory=Counter)
    """By how much the counts of a family exceed its lines, because the line about a file counts for every M."""
    notes: list[str] = field(default_factory=list)
    _bare: Counter[Key] = field(default_factory=Counter)
    """Lines that name no types, by key. They count only if no other line names the types of that M, N and K."""
    _detailed: set[tuple[str, ...]] = field(default_factory=set)
    """(M, N, K) of lines that name the types."""

    @property
    def families(self) -> list[str]:
        """The families that have a shape, the one with the most lines first."""
        return sorted(self.counts, key=lambda family: -self.counts[family].total())

    def ranked(self, family: str, top: int | None = None, least: int = 1) -> list[tuple[Key, int]]:
        """(key, lines) of a family, most frequent first, equals in the order of first sight."""
        most_common = self.counts.get(family, Counter()).most_common(top)
        return [(key, lines) for key, lines in most_common if lines >= least]

    def read(self, raw: bytes) -> None:
        """Count one line of a log. Raises InputError if the log has too many shapes."""
        self.lines += 1
        if not any(mark in raw for mark in MARKS):
            return
        for record in _RECORD.split(raw.decode("utf-8", "replace")):
            try:
                miss = read_line(record)
                if miss is not None:
                    self._count(miss)
            except ValueError as e:
                self.odd[str(e)] += 1
        if len(self.odd) + len(self.files) + len(self._bare) + sum(map(len, self.counts.values())) > MAX_SHAPES:
            raise InputError(f"more than {MAX_SHAPES} shapes: give the logs of one workload only")

    def _count(self, miss: Miss) -> None:
        family = miss.family or self.family
        if not family:
            self.unknown += 1
            return
        if FAMILIES[family].m_column not in miss.values:
            self.files[family, tuple(miss.values.items())] += 1
            return
        key = key_of(miss, family)
        if miss.bare:
            self._bare[key] += 1
            return
        if miss.details_follow:
            self._detailed.add(tuple(miss.values[name] for name in "MNK"))
        self._add(family, key, 1)

    def add_files(
        self, ms: Sequence[int], columns: Mapping[str, str], complete: Callable[[dict[str, str]], dict[str, str]] | None
    ) -> None:
        """Make a shape of each config file that an engine did not find, for every M of `ms`. `columns`: key columns
        over those of the files' names. `complete` adds columns that the names of MoE files lack. Raises InputError
        where one is missing or not legal."""
        for (family, named), lines in self.files.items():
            if self.family not in (None, family):
                continue
            values = {**dict(named), **columns}
            if complete and FAMILIES[family].two_stages:
                values = complete(values)
            try:
                keys = [key_of(Miss(family, {**values, FAMILIES[family].m_column: str(m)}), family) for m in ms]
            except ValueError as e:
                raise InputError(
                    f"config files of {family}: {e}. Their names lack some columns: give the model with"
                    " --model CONFIG.json, or write --set COLUMN=VALUE for each of model_dim and topk"
                ) from e
            for key in keys:
                self._add(family, key, lines)
            self.repeats[family] += lines * (len(keys) - 1)

    def _add(self, family: str, key: Key, lines: int) -> None:
        self.counts.setdefault(family, Counter())[key] += lines

    def close(self) -> Misses:
        """Count the lines that name no types, where no other line has them; return these misses."""
        untyped = {k: lines for k, lines in self._bare.items() if tuple(map(str, k[:3])) not in self._detailed}
        for key, lines in untyped.items():
            self._add("a16w16", key, lines)
        if untyped:
            defaults = ", ".join(f"{c.name} {c.default}" for c in get_family("a16w16").columns if c.default)
            self.notes.append(f"{plural(len(untyped), 'shape')} of a16w16 without types: taken as {defaults}")
        self._bare.clear()
        return self


def count_misses(logs: Iterable[str | Path], family: str | None = None) -> Misses:
    """The misses in all `logs` (`-`: standard input). Raises InputError where a log cannot be read."""
    misses = Misses(family)
    for log in logs:
        name = escaped(str(log))
        try:
            with _opened(log) as stream:
                for line in iter(partial(stream.readline, MAX_LINE), b""):
                    misses.read(line)
        except (EOFError, zlib.error, gzip.BadGzipFile) as e:
            misses.notes.append(f"{name}: the gzip data breaks off or is damaged ({e}); read so far")
        except (OSError, ValueError) as e:  # ValueError: a NUL in the path
            raise InputError(f"{name}: cannot be read: {getattr(e, 'strerror', None) or e}") from e
    return misses.close()


@contextmanager
def _opened(log: str | Path) -> Iterator[IO[bytes]]:
    """A log as a stream of bytes, unpacked where it is gzip; a pipe will do, a device will not."""
    if str(log) == "-":
        yield sys.stdin.buffer
        return
    with open(log, "rb") as f:
        mode = os.fstat(f.fileno()).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
            raise InputError(f"{escaped(str(log))}: is neither a file nor a pipe: give the path of a log")
        if f.peek(2)[:2] == b"\x1f\x8b":
            with gzip.open(f) as unpacked, io.BufferedReader(unpacked, 1 << 20) as buffered:
                yield buffered
        else:
            yield f


def read_calls(path: Path, family: Family) -> dict[Key, float]:
    """Calls by key, of a shape list with a column `count` or of a log (plain or gzip). Raises InputError."""
    if family.m_column in read_head(path, 4096, InputError).partition("\n")[0].split(","):
        calls = numbers(read_shapes(path, family), COUNT)
    else:
        calls = {key: float(lines) for key, lines in count_misses([path], family.name).ranked(family.name)}
    if not calls:
        what = f"neither a list of shapes with a column {COUNT}, nor a log of AITER with shapes of {family.name}"
        raise InputError(f"{path}: {what}")
    return calls
