"""Backends of rows: by libtype, else by the kernel's name as AITER's own dispatch reads it, else by the family."""

from __future__ import annotations

import re
from collections.abc import Mapping

from worker.families.table import FAMILIES

BACKENDS = ("asm", "ck", "cktile", "triton", "hipblaslt", "flydsl", "opus", "torch", "skinny")

BATCHED = tuple(
    f"aiter-bmm-{name}" for name in ("bf16", "a8w8", "a8w8-prequant", "afp4wfp4", "a16wfp4")
)  # the five of AITER's batched Triton GEMMs
BENCHED = ("torch", "aiter", "aiter-triton", "aiter-gluon", *BATCHED)
"""Backends of a bench: torch, AITER's dispatch and its Triton and Gluon kernels."""

BY_NAME: tuple[tuple[str, str], ...] = (
    (r"_ZN|f4gemm_|.*f4gemm_bf16_per1x32Fp4", "asm"),
    (r"a8w8_blockscale_cktile_|a8w8_bpreshuffle_cktile_|cktile_|.*_cktile_", "cktile"),
    (r"flydsl", "flydsl"),
    (r"opus_", "opus"),
    (r"Cijk_", "hipblaslt"),
    (r"native\Z", "torch"),
    (r"auto\Z|triton\Z|gluon\Z", "triton"),
    (r"sol\d+\Z", "skinny"),
    (r"a4w4_blockscale|a8w8_|moe_ck2stages_|batched_|bf16_batched|.*rowwise", "ck"),
)
"""The beginning of a kernel's name -> backend; for rows without a libtype. No `|` but between alternatives."""

TORCH, TRITON, CONFIG, SYNTHETIC = "torch_", "triton_", "config_", "synthetic_"
"""Beginnings of the kernels' names of our tuners torch, triton (removed in 0.3, its rows still exist), aiter-triton and
replay. AITER has none of these, and its tables must never get one."""
_TUNERS = {TORCH: "torch", TRITON: "triton", CONFIG: "aiter-triton", SYNTHETIC: "replay"}

_BY_NAME_RE = tuple((re.compile(pattern), backend) for pattern, backend in BY_NAME)


def kernel_of_aiter(name: str) -> str:
    """The backend of AITER whose kernels have names like this, "" where none has."""
    return next((backend for pattern, backend in _BY_NAME_RE if pattern.match(name)), "")


def tuner_of(kernel: str) -> str:
    """Our own tuner whose kernels have names like this, "" where none has."""
    return next((tuner for beginning, tuner in _TUNERS.items() if kernel.startswith(beginning)), "")


def backend_of(family: str, row: Mapping[str, object]) -> str:
    """The backend of a tuned or profile row (cells as text or numbers), "" where nothing names it.

    `libtype` wins; then the kernel's name; then, for families of one backend, that one. In a4w4 tables from before
    2026-05 a failed candidate may have no name: there its number decides (CK kernels are counted first).
    """
    libtype = str(row.get("libtype", "") or "").strip().lower()
    if libtype in BACKENDS:
        return libtype
    name = str(row.get("kernelName") or row.get("kernelName1") or "").strip()
    if name and name not in ("None", "Null", "nan"):
        by_name = kernel_of_aiter(name)
        if by_name:
            return by_name
    if family not in FAMILIES:
        return ""
    aiter = FAMILIES[family].aiter
    number = str(row.get("kernelId", "")).strip()
    if aiter.ck_kernels and number.isdigit():
        return "ck" if int(number) < aiter.ck_kernels else "asm"
    return aiter.only_backend
