"""The problems of a kind of AITER's configs, made of a shape's key columns."""

from __future__ import annotations

from dataclasses import dataclass

from worker.triton_configs.kinds import ConfigKind
from worker.tuners.common.case import BLOCK8, MX4, PRE4, PRE8, ROW8, Case, case_of
from worker.tuners.common.problem import Problem

BENCH_BACKENDS = {
    "batched_a4w4": "aiter-bmm-afp4wfp4",
    "batched_a16w4": "aiter-bmm-a16wfp4",
    "batched_a8w8_prequant": "aiter-bmm-a8w8-prequant",
}
"""Kinds with a format of their own, by the backend of a bench that has it (worker/tuners/common/case.py)."""
FAMILIES_OF_KINDS = {"a4w4_preshuffle": "a4w4_blockscale", **dict.fromkeys(BENCH_BACKENDS, "batched_bf16")}
"""Family whose key columns the shapes of a kind have, where no family of tables is the kind's own."""
_SCALES = {ROW8: "row", BLOCK8: "block", MX4: "mx", PRE8: "row", PRE4: "mx"}


@dataclass(frozen=True, slots=True, kw_only=True)
class KindProblem(Problem):
    """A problem of one kind. Where X is quantised within the call, its bytes are counted as those of W's format."""

    kind: str
    case: Case


def family_of(kind: ConfigKind) -> str:
    """The family whose key columns a kind's shapes have; "" if there is none."""
    return kind.family or FAMILIES_OF_KINDS.get(kind.name, "")


def problem_of(kind: str, family: str, key: dict[str, int | str], gfx: str) -> KindProblem:
    """The problem of a shape's key columns. Raises UnsupportedError."""
    case = case_of(family, key, BENCH_BACKENDS.get(kind, ""), gfx)
    return KindProblem(
        family,
        max(1, case.b),
        case.m,
        case.n,
        case.k,
        case.dtype,
        case.outdtype,
        case.bias,
        _SCALES.get(case.format, "none"),
        kind=kind,
        case=case,
    )
