"""Tiny shapes that are tuned before anything is measured: one has the modules built, one proves K % 256 != 0.

Both are run as any other shape is, and their rows are thrown away.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from worker.families import Family
from worker.protocol import SpecShape

ODD_K = {"M": 64, "N": 256, "K": 384}
"""The smallest shape whose scales are padded: 12 groups of 32 in K, 16 with padding."""


def tiny_key(family: Family, gfx: str) -> dict[str, int | str]:
    """A shape of the family that every date's kernels take."""
    fp8 = "torch.float8_e4m3fnuz" if gfx.startswith("gfx94") else "torch.float8_e4m3fn"
    half = "torch.bfloat16"
    known: dict[str, int | str] = {
        "B": 2, "M": 64, "N": 512, "K": 512, "bias": "False", "dtype": half, "outdtype": half, "scaleAB": "False",
        "bpreshuffle": "False", "q_dtype_w": "torch.int8" if family.name == "a8w8" else fp8, "q_dtype_a": fp8,
        "token": 16, "model_dim": 1024, "inter_dim": 512, "expert": 8, "topk": 2, "act_type": "ActivationType.Silu",
        "q_type": "QuantType.per_Token", "use_g1u1": 1, "doweight_stage1": 0,
    }  # fmt: skip
    return {column: known[column] for column in family.key_names}


def tiny_shape(family: Family, gfx: str) -> SpecShape:
    return SpecShape(0, tiny_key(family, gfx))


@dataclass(frozen=True, slots=True)
class Gate:
    """What became of the candidates of ODD_K on an image that is statically unsound for such K."""

    tried: int
    ran: int
    right: int
    least_error: float
    limit: float

    @property
    def opens(self) -> bool:
        """Whether shapes of such K are worth trying."""
        return self.right > 0

    def words(self) -> str:
        size = "x".join(str(v) for v in ODD_K.values())
        least = f"{self.least_error:.3g}" if math.isfinite(self.least_error) else "unknown"
        return (
            f"K is no multiple of 256, and this AITER pads and lays out the scales of such K wrongly: of {self.tried} "
            f"candidates for {size}, {self.ran} ran and {self.right} are right (least error {least}, limit "
            f"{self.limit:g}); its production kernels are wrong there too; v0.1.14 and newer have it right"
        )

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**asdict(self), "least_error": repr(self.least_error)}))

    @classmethod
    def load(cls, path: Path, limit: float) -> Gate | None:
        """What was found before with the same limit."""
        try:
            raw = json.loads(path.read_text())
            gate = cls(**{**raw, "least_error": float(raw["least_error"])})
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return gate if gate.limit == limit else None
