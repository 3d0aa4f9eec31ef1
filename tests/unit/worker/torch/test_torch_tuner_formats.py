"""Number formats, problems, options and inputs of the torch tuner, against naive code that shares nothing with it."""

from __future__ import annotations

import pytest
import torch

from worker.tuners.common.operands import unpack_codes, widen
from worker.tuners.common.problem import Problem, UnsupportedError, parse
from worker.tuners.torch.search import Operands, Weights, layout_bytes, needed_bytes
from worker.tuners.torch.spec import Options

A16W16, A8W8, A4W4 = "a16w16", "a8w8", "a4w4_blockscale"
CPU = torch.device("cpu")
PLENTY = 1 << 34


def weights(p: Problem) -> Weights:
    return Weights.make(p, CPU, 0, lambda: PLENTY)


def naive_e2m1(code: int) -> float:
    """Sign, two exponent bits of bias 1, one mantissa bit; exponent 0 is subnormal."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    size = mantissa * 0.5 if exponent == 0 else (1 + mantissa * 0.5) * 2.0 ** (exponent - 1)
    return -size if sign else size


def naive_mxfp4(codes: torch.Tensor, scale: torch.Tensor) -> list[list[float]]:
    out = []
    for r in range(codes.shape[0]):
        row = []
        for i in range(2 * codes.shape[1]):
            byte = int(codes[r, i // 2])
            nibble = byte & 15 if i % 2 == 0 else byte >> 4
            row.append(naive_e2m1(nibble) * 2.0 ** (int(scale[r, i // 32]) - 127))
        out.append(row)
    return out


def test_mxfp4_is_dequantised_as_by_naive_code() -> None:
    draw = torch.Generator().manual_seed(1)
    codes = torch.arange(256, dtype=torch.uint8).view(4, 64)
    scale = torch.randint(2, 250, (4, 4), dtype=torch.uint8, generator=draw)
    want = torch.tensor(naive_mxfp4(codes, scale), dtype=torch.float64)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(unpack_codes(codes, scale, dtype).double(), want)


@pytest.mark.parametrize(
    ("family", "dtype", "k"),
    [
        (A16W16, "bfloat16", 64), (A16W16, "float16", 4096), (A16W16, "float32", 1000), (A8W8, "int8", 777),
        (A8W8, "float8_e4m3fn", 512), (A8W8, "float8_e4m3fnuz", 512), (A4W4, "float4_e2m1fn_x2", 2048),
    ],
)  # fmt: skip
def test_inputs_are_seeded_and_outputs_are_near_one(family: str, dtype: str, k: int) -> None:
    p = Problem(family, 1, 16, 96, k, dtype)
    a, b = (Operands.make(p, weights(p)) for _ in range(2))
    assert torch.equal(widen(p, *a.checked), widen(p, *b.checked))
    assert torch.equal(widen(p, *a.weights.master), widen(p, *b.weights.master))
    assert not torch.equal(widen(p, *a.checked), widen(p, *a.timed[0])), "the checked X must never be timed"
    reference = a.reference(lambda: None)
    assert 0.5 < float(reference.std()) < 2.0
    wide = widen(p, *a.weights.master)
    if family != A8W8:
        assert torch.equal(wide, wide.bfloat16().float()), "inputs are exact in bfloat16"


@pytest.mark.parametrize(
    ("family", "dtype", "bias"),
    [
        (A16W16, "bfloat16", True), (A16W16, "float16", False), (A8W8, "int8", False), (A8W8, "float8_e4m3fn", False),
        (A4W4, "float4_e2m1fn_x2", False),
    ],
)  # fmt: skip
def test_the_reference_is_the_sum_of_products(family: str, dtype: str, bias: bool) -> None:
    """Against Python floats, element by element, from the stored bytes."""
    p = Problem(family, 1, 2, 5, 64, dtype, bias=bias)
    o = Operands.make(p, weights(p))
    x, w = o.checked, o.weights.master
    if family == A4W4:
        xs, ws = naive_mxfp4(x[0], x[1]), naive_mxfp4(w[0], w[1])
    else:
        xs, ws = ([[float(v) for v in row] for row in t[0].double().tolist()] for t in (x, w))
    got = o.reference(lambda: None)
    for m in range(2):
        for n in range(5):
            want = sum(a * b for a, b in zip(xs[m], ws[n], strict=True))
            if family == A8W8:
                want *= float(x[1][m]) * float(w[1][n])
            if o.bias is not None:
                want += float(o.bias[n])
            assert float(got[m, n]) == pytest.approx(want, rel=1e-5, abs=1e-5)


def test_parse_takes_aiters_columns() -> None:
    key: dict[str, int | str] = {"M": 1, "N": 7, "K": 33, "bias": "TRUE", "dtype": "torch.float16"}
    assert parse(A16W16, key) == Problem(A16W16, 1, 1, 7, 33, "float16", "float16", True)
    assert parse(A16W16, {"M": 1, "N": 7, "K": 33, "outdtype": "torch.float32"}).outdtype == "float32"
    assert parse(A8W8, {"M": 1, "N": 7, "K": 33}) == Problem(A8W8, 1, 1, 7, 33, "int8")
    p = parse(A4W4, {"M": 16, "N": 256, "K": 1024})
    assert (p.dtype, p.flops, p.x_bytes, p.w_bytes) == ("float4_e2m1fn_x2", 2 * 16 * 256 * 1024, 8192, 131072)
    assert (p.moved_bytes, p.scale_bytes) == (8192 + 131072 + 8192, (16 + 256) * 32)
    assert layout_bytes(p, "bf16") == 2 * 256 * 1024 + p.scale_bytes
    assert needed_bytes(p) > p.moved_bytes


@pytest.mark.parametrize(
    ("family", "key", "words"),
    [
        ("fmoe", {}, "no candidates for family fmoe"),
        ("batched_a8w8", {"B": 1, "M": 1, "N": 1, "K": 1}, "batched_a8w8"),
        (A16W16, {"M": 1, "N": 1, "K": 8, "scaleAB": "True"}, "scaleAB is True"),
        (A16W16, {"M": 1, "N": 1, "K": 8, "bpreshuffle": "True"}, "bpreshuffle is True"),
        (A16W16, {"M": 1, "N": 1, "K": 8, "bias": "maybe"}, "bias is 'maybe'"),
        (A16W16, {"M": 1, "N": 1, "K": 8, "dtype": "torch.int8"}, "dtype is 'torch.int8'"),
        (A8W8, {"M": 1, "N": 1, "K": 8, "q_dtype_w": "torch.uint8"}, "q_dtype_w"),
        (A8W8, {"M": 0, "N": 1, "K": 8}, "M is 0"),
        (A8W8, {"M": 1, "N": 1, "K": 2**31}, "K is 2147483648"),
        (A8W8, {"M": 1, "N": "many", "K": 8}, "no whole number N"),
        (A8W8, {"M": 1, "N": 1}, "no whole number K"),
        (A4W4, {"M": 1, "N": 1, "K": 33}, "multiple of 32"),
    ],
)
def test_what_is_not_supported_is_said(family: str, key: dict[str, int | str], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        parse(family, key)


def test_options_have_defaults_and_limits() -> None:
    assert Options.parse({}) == Options()
    got = Options.parse({"budget_s_per_shape": 1, "threads": [2, 1, 2], "again": 7})
    assert (got.budget_s_per_shape, got.threads, got.again) == (1.0, (2, 1), 7)
    with pytest.raises(ValueError, match=r"unknown option 'budget'.*threads is.*again is True.*rotate_mb is -1"):
        Options.parse({"budget": 1, "threads": [0], "again": True, "rotate_mb": -1})
