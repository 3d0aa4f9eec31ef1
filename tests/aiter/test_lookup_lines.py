"""AITER's words about its lookups, read back: every line that the real files can write at each version, filled in."""

from __future__ import annotations

import ast

import pytest

from orchestrator.families import get_family
from orchestrator.results.verify import VerifyReader
from orchestrator.shapes.aiter_log import key_of, read_line
from tests.aiter.checkout import VERSIONS, needs_checkout, show
from worker.families import FAMILIES

pytestmark = needs_checkout

NEWEST = "e4048607a5"
FILES = {
    "aiter/ops/gemm_op_a4w4.py": "a4w4_blockscale",
    "aiter/ops/gemm_op_a8w8.py": "a8w8_bpreshuffle",
    "aiter/ops/batched_gemm_op_a8w8.py": "batched_a8w8",
    "aiter/ops/batched_gemm_op_bf16.py": "batched_bf16",
    "aiter/tuned_gemm.py": "a16w16",
}
"""Files with lookups, and a family of each (the table's name decides for a8w8)."""
MXSCALE = "batched_gemm_a8w8_blockscale_mxscale"
"""A second family of batched_gemm_op_a8w8.py, whose lines have a form of their own."""
BF16 = "torch.bfloat16"
VALUES = {
    "M": "48", "N": "512", "K": "1024", "B": "16", "m": "48", "n": "512", "k": "1024", "b": "16",
    "padded_M": "48", "cu_num": "256", "gfx": "gfx950", "dtype": BF16,
    "otype": BF16, "bias": "False", "scaleAB": "False", "bpreshuffle": "False", "q_dtype_w": "torch.float8_e4m3fn",
    "kernelName": "kern", "config['kernelName']": "kern", "config['splitK']": "0", "config['libtype']": "asm",
    "default_config['libtype']": "torch", "default_config['solidx']": "0",
}  # fmt: skip


def lines(version: str, path: str, mark: str) -> list[str]:
    """The texts of a file that hold `mark`, as AITER would write them; none where there is no such file."""
    table = f"/t/{FAMILIES[FILES[path]].tuned_csv}"
    try:
        nodes = [n.values for n in ast.walk(ast.parse(show(version, path))) if isinstance(n, ast.JoinedStr)]
    except FileNotFoundError:
        return []
    texts = ("".join(_filled(part, table) for part in parts) for parts in nodes)
    return [text for text in texts if mark in text]


def _filled(part: ast.expr, table: str) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
    assert isinstance(part, ast.FormattedValue)
    value = VALUES.get(ast.unparse(part.value), table)
    return repr(value) if part.conversion == ord("r") and value.startswith("torch") else value


@pytest.mark.parametrize("version", VERSIONS)
def test_every_miss_and_every_hit_is_read(version: str) -> None:
    misses = [(text, f) for path, f in FILES.items() for text in lines(version, path, "not found tuned")]
    for text, family in misses:
        miss = read_line("[aiter] " + text)
        assert miss is not None, text
        assert miss.family == (MXSCALE if "tuned/padded" in text else family), text
        of = get_family(miss.family)
        key = dict(zip(of.key_names, key_of(miss, of.name), strict=True))
        assert (key["M"], key["N"], key["K"], key.get("B", 16)) == (48, 512, 1024, 16)
        assert key.get("outdtype", BF16) == BF16 or "dtype=" not in text
    hits = [(text, f) for path, f in FILES.items() for text in lines(version, path, "is tuned")]
    for text, family in hits:
        of = get_family(MXSCALE if "is tuned on gfx" in text else family)
        row = {c.name: c.default or "" for c in of.columns} | {k: VALUES[k] for k in of.key_names if k in VALUES}
        row |= {"outdtype": BF16} if family == "a16w16" else {}
        reading = VerifyReader("a", [{**row, "kernelName": "kern", "us": "1.0"}], of)
        reading.read_line("[aiter] " + text)
        assert [r.selected for r in reading.answer.rows] == [True], text
    assert len(misses) >= 5
    assert len(hits) >= 2
