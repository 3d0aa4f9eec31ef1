"""The backend of a row: the worker's rule, named by the owner of the kernels."""

from __future__ import annotations

from orchestrator.results.measurements import layout
from orchestrator.tables.kinds import backend_name, legal_name
from worker.families import FAMILIES

A4W4, A8W8 = FAMILIES["a4w4_blockscale"], FAMILIES["a8w8"]


def test_triton_is_aiters_but_for_rows_of_the_tuner_that_is_gone() -> None:
    for family in (FAMILIES["a16w16"], A8W8):
        for libtype in ("Triton", ""):
            assert backend_name(family.name, "auto", "", libtype) == "aiter-triton"
            assert backend_name(family.name, "triton_128x64x64_g8_k1_w4_s3", "", libtype) == "unknown"
    routed = FAMILIES["a8w8_blockscale_bpreshuffle"]
    assert [backend_name(routed.name, n, "0", "triton") for n in ("triton", "gluon", "anything")] == [
        "aiter-triton", "aiter-gluon", "aiter-triton"]  # fmt: skip
    wide = layout(("M", "N", "K", "triton_us", "gluon_us", "mine_us"), A4W4).wide
    assert [w.backend for w in wide] == ["aiter-triton", "aiter-gluon", "mine"]


def test_names_of_columns_become_backends_only_where_they_are_names() -> None:
    assert legal_name("Triton") == "triton"
    assert [legal_name(n) for n in ("", "a b", "x'; --", "a" * 30, "\x1b[1m")] == [None] * 5
