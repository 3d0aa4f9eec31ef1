"""The backend of a row: one rule, in Python and in SQL."""

from __future__ import annotations

import csv

import duckdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.analysis.backends.query import sql_backend
from orchestrator.analysis.backends.scan import layout
from orchestrator.tables.backends import KNOWN, label, legal_name, order, owned
from tests.support.analysis_kit import AITER_TABLES, NO_TABLES
from tests.support.marks import drawn
from worker.families import BACKENDS, FAMILIES, backend_of
from worker.families.backends import BY_NAME, TRITON

NAMES = (
    "_ZN5aiter41f4gemm_bf16_per1x32Fp4_BpreShuffle_32x128E", "f4gemm_bf16_x", "xx_f4gemm_bf16_per1x32Fp4_y",
    "a4w4_blockscale_256x64x128x128_v3", "a8w8_blockscale_cktile_1", "a8w8_bpreshuffle_cktile_2", "cktile_3",
    "moe_cktile2stages_4", "a8w8_rowwise_256", "a8w8_blockscale_1x128x128_256", "batched_a", "bf16_batched_64x16",
    "moe_ck2stages_gemm1", "some_rowwise_kernel", "flydsl_bpreshuflle_1", "flydsl_moe1_x", "opus_gemm_8", "Cijk_Alik",
    "native", "nativex", "auto", "auto1", "triton", "gluon",
    "gluons", "sol7", "sol", "sol7x", "something else", "None", "Null", "nan", "",
    "ck_x_cktile_y",
)  # fmt: skip


Rows = list[dict[str, str]]


def in_sql(family: str, rows: Rows) -> list[str]:
    """The backend of each row by the SQL rule, in one query."""
    null = ("", "Null", "null", "NULL", "None")
    cells = [
        tuple(None if r[c].strip() in null else r[c].strip() for c in ("kernelName", "kernelId", "libtype"))
        for r in rows
    ]
    rule = sql_backend(family, kernel="k", kernel_id="i", libtype="l")
    values = ", ".join("(" + ", ".join("NULL" if c is None else f"'{c}'" for c in row) + ")" for row in cells)
    with duckdb.connect(":memory:") as db:
        typed = "SELECT k::VARCHAR AS k, i::VARCHAR AS i, l::VARCHAR AS l"
        return [
            str(b) for (b,) in db.execute(f"SELECT {rule} FROM ({typed} FROM (VALUES {values}) t(k, i, l))").fetchall()
        ]


def in_python(family: str, rows: Rows) -> list[str]:
    found = [backend_of(family, row) or "unknown" for row in rows]
    gluon = [b == "triton" and row["kernelName"] == "gluon" for b, row in zip(found, rows, strict=True)]
    return ["aiter-gluon" if hint else owned(b) for b, hint in zip(found, gluon, strict=True)]


def test_triton_is_aiters_but_for_rows_of_the_tuner_that_is_gone() -> None:
    rows = [
        {"kernelName": name, "kernelId": "", "libtype": libtype}
        for name in ("auto", "triton_128x64x64_g8_k1_w4_s3")
        for libtype in ("triton", "")
    ]
    for family in ("a16w16", "a8w8"):
        assert in_sql(family, rows) == ["aiter-triton", "aiter-triton", "unknown", "unknown"]
    routed = [{"kernelName": n, "kernelId": "0", "libtype": "triton"} for n in ("triton", "gluon", "anything")]
    assert in_sql("a8w8_blockscale_bpreshuffle", routed) == ["aiter-triton", "aiter-gluon", "aiter-triton"]
    wide = layout(("M", "N", "K", "triton_us", "gluon_us", "mine_us"), FAMILIES["a4w4_blockscale"]).wide
    assert [w.backend for w in wide] == ["aiter-triton", "aiter-gluon", "mine"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_rule_in_sql_agrees_with_the_workers(family: str) -> None:
    rows = [
        {"kernelName": name, "kernelId": number, "libtype": libtype}
        for name in NAMES
        for number in ("", "3", "19", "20", "44", "x", "-1")
        for libtype in ("", "CK", "asm", "Triton", "odd")
    ]
    assert in_sql(family, rows) == in_python(family, rows)


_PARTS = [part for pattern, _ in BY_NAME for part in pattern.split("|")]
_DRAWN = st.tuples(st.sampled_from(_PARTS), st.text("a_1Z", max_size=6)).map(
    lambda drawn: drawn[0].replace(".*", "x").replace("\\Z", "").replace("\\d+", "12") + drawn[1]
)
_NAME = _DRAWN.filter(lambda name: not name.startswith(TRITON))  # ours, of which the worker's rule knows nothing
_ROW = st.fixed_dictionaries(
    {
        "kernelName": _NAME,
        "kernelId": st.sampled_from(["", "5", "25"]),
        "libtype": st.sampled_from(["", "Null", *BACKENDS]),
    }
)


@drawn(15)
@given(st.sampled_from(sorted(FAMILIES)), st.lists(_ROW, min_size=20, max_size=60))
def test_they_agree_on_drawn_names(family: str, rows: Rows) -> None:
    assert in_sql(family, rows) == in_python(family, rows)


@pytest.mark.skipif(AITER_TABLES is None, reason=NO_TABLES)
def test_they_agree_on_the_tables_that_aiter_ships() -> None:
    assert AITER_TABLES is not None
    for name, family in (("a4w4_blockscale_tuned_gemm", "a4w4_blockscale"), ("bf16_tuned_gemm", "a16w16")):
        with (AITER_TABLES / f"{name}.csv").open() as f:
            rows = [{"kernelId": "", "libtype": "", **row} for row in csv.DictReader(f)]
        assert in_sql(family, rows) == in_python(family, rows)


def test_names_of_columns_become_backends_only_where_they_are_names() -> None:
    assert legal_name("Triton") == "triton"
    assert [legal_name(n) for n in ("", "a b", "x'; --", "a" * 30, "\x1b[1m")] == [None] * 5


def test_order_and_labels() -> None:
    shown = sorted(["unknown", "torch", "mine", "asm", "ck", "aiter-triton", "aiter-gluon"], key=order)
    assert shown == ["asm", "ck", "aiter-gluon", "aiter-triton", "torch", "mine", "unknown"]
    assert (label("cktile"), label("mine")) == ("CK-Tile", "mine")
    assert set(BACKENDS) < set(KNOWN)


def test_the_patterns_have_only_what_the_translation_understands() -> None:
    for pattern, _ in BY_NAME:
        assert "(" not in pattern, "a group could hold a |, at which the SQL is split"
