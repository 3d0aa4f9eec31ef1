"""Kinds of candidate that a shape of a family should have on a tree and chip, read from the tree's files.

A kind that AITER then does not try at all was lost on the way: to another chip's name in the environment, to a list of
kernels that is not where it is looked for. Only kinds whose conditions the files tell are named; each with the
conditions on a shape, `COLUMN % N,...` (a multiple of one of them) or `COLUMN = VALUE,...`.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path

from worker.families import FAMILIES, Family
from worker.tuners.aiter.inspect.a4w4 import LIST
from worker.tuners.aiter.tree.locate import Tree
from worker.tuners.aiter.tree.reading import read_text

Kinds = dict[str, list[str]]
"""Kind (as in libtype) to its conditions, all of which have to hold."""
_BOTH = ("ck", "cktile")


def expected(tree: Tree, family: Family, gfx: str, words: tuple[str, ...] = ()) -> Kinds:
    """What the family's candidates should be of. `words`: what the user has the script told beside ours."""
    script = tree.scripts.get(family.name)
    if script is None:
        return {}
    try:
        text = read_text(script)
    except (OSError, ValueError):
        return {}

    def rows(rel: str) -> list[dict[str, str]]:
        return _rows(tree.meta / "hsa" / gfx / rel) if rel.split("/")[0] in text else []

    found = _FAMILIES.get(family.name, _only_ck)(text, rows, gfx)
    wanted = _wanted(words)
    return {kind: where for kind, where in found.items() if wanted is None or kind in wanted}


def _only_ck(text: str, rows: Callable[[str], list[dict[str, str]]], gfx: str) -> Kinds:
    return {"ck": []}


def _a4w4(text: str, rows: Callable[[str], list[dict[str, str]]], gfx: str) -> Kinds:
    return {"ck": [], **({"asm": []} if rows(LIST) else {})}


def _blockscale(text: str, rows: Callable[[str], list[dict[str, str]]], gfx: str) -> Kinds:
    return {"ck": [], **_cktile(text, [])}


def _blockscale_bpreshuffle(text: str, rows: Callable[[str], list[dict[str, str]]], gfx: str) -> Kinds:
    shuffled = [r for r in rows("fp8gemm_blockscale/fp8gemm_bf16_blockscale.csv") if r.get("bpreshuffle") == "1"]
    return {**_blockscale(text, rows, gfx), **_asm(shuffled, [])}


def _a8w8_bpreshuffle(text: str, rows: Callable[[str], list[dict[str, str]]], gfx: str) -> Kinds:
    fp8 = ["q_dtype_w = " + ("torch.float8_e4m3fnuz" if gfx.startswith("gfx94") else "torch.float8_e4m3fn")]
    int8 = ["q_dtype_w = torch.int8"]
    return {"ck": fp8, **_cktile(text, fp8), **_asm(rows("i8gemm/i8gemm_bf16_perTokenI8.csv"), int8)}


def _a16w16(text: str, rows: Callable[[str], list[dict[str, str]]], gfx: str) -> Kinds:
    if "get_asm_dir" not in text:  # gradlib's wrapper, whose tuner always asks hipBLASLt
        return {"hipblaslt": []}
    shuffled = sorted({"True" if r.get("bPreshuffle") == "1" else "False" for r in rows(_BF16)})
    plain = ["bias = False", "scaleAB = False", "dtype = torch.bfloat16", "K % 64", "N % 64"]
    return {"asm": [*plain, "bpreshuffle = " + ",".join(shuffled)]} if shuffled else {}


_BF16 = "bf16gemm/bf16gemm_fp32bf16.csv"
_FAMILIES: dict[str, Callable[[str, Callable[[str], list[dict[str, str]]], str], Kinds]] = {
    **{f.name: _only_ck for f in FAMILIES.values() if f.aiter.only_backend == "ck"},
    "a4w4_blockscale": _a4w4,
    "a8w8_blockscale": _blockscale,
    "a8w8_blockscale_bpreshuffle": _blockscale_bpreshuffle,
    "a8w8_bpreshuffle": _a8w8_bpreshuffle,
    "a16w16": _a16w16,
    "fmoe": lambda text, rows, gfx: {},  # which kinds a shape has depends on its quantisation in many ways
}


def _cktile(text: str, where: list[str]) -> Kinds:
    return {"cktile": where} if '"cktile"' in text or "'cktile'" in text else {}


def _asm(rows: list[dict[str, str]], where: list[str]) -> Kinds:
    tiles = sorted({int(n) for r in rows if (n := r.get("tile_n", r.get("tile_N", ""))).isdigit() and int(n)})
    return {"asm": [*where, "N % " + ",".join(map(str, tiles))]} if tiles else {}


def _rows(path: Path) -> list[dict[str, str]]:
    try:
        lines = csv.DictReader(io.StringIO(read_text(path)), skipinitialspace=True)
        return [{str(k).strip(): str(v).strip() for k, v in line.items()} for line in lines]
    except (OSError, ValueError, csv.Error):
        return []


def _wanted(words: tuple[str, ...]) -> set[str] | None:
    """The kinds that `--libtype` leaves, None for all."""
    out: set[str] = set()
    taking = False
    for word in words:
        if word.startswith("-"):
            name, sep, word = word.partition("=")
            taking = name == "--libtype"
            if not sep:
                continue
        if taking:
            out |= set(word.split(","))
    if not out or "all" in out:
        return None
    return out | set(_BOTH) if "both" in out else out
