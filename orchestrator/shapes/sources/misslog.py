"""AITER's words about a shape that has no tuned row, read back. Pure.

Sources (ROCm/aiter, v0.1.5 to e4048607a5): `get_GEMM_config` and its like in aiter/ops/gemm_op_a4w4.py,
gemm_op_a8w8.py and batched_gemm_op_*.py, `get_GEMM_A16W16_config` and its forerunner in aiter/tuned_gemm.py,
`get_2stage_cfgs` in aiter/fused_moe.py. Newer versions log a shape once a process, for the lookup is cached.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from orchestrator.shapes.cells import CellError, CellReader
from orchestrator.shapes.notes import Notes
from worker.families import FAMILIES, Family

Key = tuple[int | str, ...]

MARKS = (b"not found tuned", b"[fused_moe] using", b" solution:")
"""A line without any of these says nothing of interest."""

_MISS = re.compile(
    r"shape (?:is )?(?:B:(?P<B>\d+), ?)?M:(?P<M>\d+), ?N:(?P<N>\d+), ?K:(?P<K>\d+)(?P<more>.{0,400}?)"
    r"not found tuned config in (?P<where>.{1,1000}?), will use default config"
)
_OTHER = re.compile(r"not found tuned(?:/padded)? config")
_USING = re.compile(
    r"using torch solution:0 for (?P<case>[mM])=(?P<M>\d+) [nN]=(?P<N>\d+) [kK]=(?P<K>\d+) (?P<more>.{0,200})"
)
_FMOE = re.compile(r"\[fused_moe\] using [12]stage(?: xbf16)? default for \((?P<keys>[^()]{1,800})\)")
_DETAIL = re.compile(r"\b(q_dtype_w|dtype|otype|bias|scaleAB|bpreshuffle)[:=] ?'?(torch\.\w+|True|False)\b")
_COLUMN = {"otype": "outdtype"}
_STEMS = sorted(
    ((PurePosixPath(f.tuned_csv).stem, f.name) for f in FAMILIES.values()), key=lambda pair: len(pair[0]), reverse=True
)
_FMOE_CELL = re.compile(r"'([^']{0,80})'|<(ActivationType\.\w+)[^<>]{0,20}>|([\w.]{1,80})")


@dataclass(frozen=True, slots=True)
class Miss:
    """A shape that AITER had no row for. `family` "": the line does not tell. `values`: key columns that it names.

    `bare`: a line of late 2025 that leaves out what the line after it tells (`told_again`).
    """

    family: str
    values: Mapping[str, str]
    bare: bool = False
    told_again: bool = False


def read_line(line: str) -> Miss | None:
    """The miss that a log line speaks of. Raises ValueError where it speaks of one that cannot be read."""
    if "not found tuned" in line:
        found = _MISS.search(line)
        if found is None:
            if _OTHER.search(line):
                raise ValueError("a family that gemmfleet does not know, or a line that was cut")
            return None
        values = {name: found[name] for name in ("B", "M", "N", "K") if found[name]}
        details = _details(found["more"])
        family = _family(found["where"], values, details, found["more"])
        return Miss(family, {**values, **details}, bare=family == "a16w16" and not details)
    if "[fused_moe]" in line:
        return _fmoe(line)
    if used := _USING.search(line):
        values = {name: used[name] for name in ("M", "N", "K")}
        return Miss("a16w16", {**values, **_details(used["more"])}, told_again=used["case"] == "M")
    return None


def _details(text: str) -> dict[str, str]:
    return {_COLUMN.get(name, name): value for name, value in _DETAIL.findall(text)}


def _family(where: str, values: Mapping[str, str], details: Mapping[str, str], more: str) -> str:
    """By the table's name; where the user named it otherwise, by what the line says."""
    if "B" in values:
        return "batched_bf16" if "dtype is bf16" in more else "batched_a8w8"
    name = PurePosixPath(where.strip()).name
    for stem, family in _STEMS:
        if stem in name:
            return family
    if where.strip() == "CKGEMM or asmGEMM":
        return "a4w4_blockscale"
    return "a16w16" if "dtype" in details else ""


def _fmoe(line: str) -> Miss | None:
    found = _FMOE.search(line)
    if found is None:
        return None
    cells = ["".join(groups) for groups in _FMOE_CELL.findall(found["keys"])]
    if cells and cells[0].startswith("gfx"):
        cells = cells[1:]
    family = FAMILIES["fmoe"]
    if len(cells) != 1 + len(family.key_names):  # cu_num, then the key
        raise ValueError("a mixture of experts of another kind than fmoe, or a line that was cut")
    values = dict(zip(family.key_names, cells[1:], strict=True))
    for name in ("use_g1u1", "doweight_stage1"):
        values[name] = {"True": "1", "False": "0"}.get(values[name], values[name])
    if values["q_dtype_w"] == "torch.uint32":  # as AITER's own list writes it
        values["q_dtype_w"] = "torch.int4"
    return Miss("fmoe", values)


class Keys:
    """Turns misses of a family into keys, each cell checked as in a shapes file."""

    def __init__(self, family: Family) -> None:
        self.family = family
        notes = Notes()
        self._readers = {c.name: CellReader(c, family.limits, notes) for c in family.columns}

    def key(self, miss: Miss) -> Key:
        """The key. Raises ValueError where a cell is not legal or a required column is not told."""
        out: list[int | str] = []
        for c in self.family.columns:
            text = miss.values.get(c.name, c.default)
            if text is None:
                raise ValueError(f"{c.name} is not told")
            try:
                out.append(self._readers[c.name].read(text, 0))
            except CellError as e:
                raise ValueError(f"{c.name}: {e}") from e
        return tuple(out)


def of_family(miss: Miss, name: str) -> Miss:
    """The miss as one of that family, where its line does not tell."""
    return miss if miss.family else replace(miss, family=name)
