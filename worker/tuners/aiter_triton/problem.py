"""A GEMM as a kind of AITER's computes it: the case that its inputs are drawn by, and the problem that is searched."""

from __future__ import annotations

from dataclasses import dataclass

from worker.bench.case import BLOCK8, MX4, PRE4, PRE8, ROW8, Case, parse
from worker.triton_configs.kinds import BY_NAME, ConfigKind
from worker.tuners.common.problem import Problem

OF_BENCH = {
    "batched_a4w4": "aiter-bmm-afp4wfp4",
    "batched_a16w4": "aiter-bmm-a16wfp4",
    "batched_a8w8_prequant": "aiter-bmm-a8w8-prequant",
}  # kinds with a format of their own, by the backend of a bench that has it (worker/bench/case.py)
# Family whose key columns the shapes of a kind have, where no family of tables is the kind's own.
ALIKE = {"a4w4_preshuffle": "a4w4_blockscale", **dict.fromkeys(OF_BENCH, "batched_bf16")}
_SCALES = {ROW8: "row", BLOCK8: "block", MX4: "mx", PRE8: "row", PRE4: "mx"}


@dataclass(frozen=True, slots=True, kw_only=True)
class KindProblem(Problem):
    """A problem of one kind. Where X is quantised within the call, its bytes are counted as those of W's format."""

    kind: str
    case: Case

    @property
    def batch(self) -> int | None:
        """B of a batched case, None for another."""
        return self.case.b or None

    @property
    def group_key(self) -> tuple[object, ...]:
        """All but M."""
        return (self.kind, self.b, self.n, self.k, self.dtype, self.outdtype, self.bias)


def family_of(kind: ConfigKind) -> str:
    """The family whose key columns a kind's shapes have."""
    return kind.family or ALIKE.get(kind.name, "")


def case_of(kind: ConfigKind, family: str, key: dict[str, int | str], gfx: str) -> Case:
    """The case of a shape's key columns. Raises UnsupportedError."""
    return parse(family, key, OF_BENCH.get(kind.name, ""), gfx)


def problem_of(kind: str, family: str, key: dict[str, int | str], gfx: str) -> KindProblem:
    """The problem of a shape's key columns. Raises UnsupportedError."""
    c = case_of(BY_NAME[kind], family, key, gfx)
    scale = _SCALES.get(c.format, "none")
    return KindProblem(family, max(1, c.b), c.m, c.n, c.k, c.dtype, c.outdtype, c.bias, scale, kind=kind, case=c)
