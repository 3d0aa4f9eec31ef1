"""Registry entry and options of the tuner `torch`: real GEMM candidates on any CPU or GPU that torch runs on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from worker.registry import option, parse_options, seconds, whole
from worker.tuners.catalog import AGAIN, Flag, TunerSpec

DEFAULT_BUDGET_S = 3.5


def _threads(value: Any) -> tuple[int, ...]:
    counts = value if isinstance(value, (list, tuple)) else [value]
    if counts == [None]:
        return ()
    if not all(type(count) is int and 1 <= count <= 9999 for count in counts):
        raise ValueError("not a list of numbers from 1 to 9999")
    return tuple(dict.fromkeys(counts))


@dataclass(frozen=True, slots=True)
class TorchOptions:
    """Each option with its default; docs/reference/tuners.md explains them."""

    budget_s_per_shape: float = option(DEFAULT_BUDGET_S, seconds(0.05, 3600))
    """Seconds for all of a shape: inputs, checks, measuring, re-rank."""
    threads: tuple[int, ...] = option((), _threads)
    """CPU thread counts to try; empty means all cores, half of them, and one."""
    rotate_mb: int = option(0, whole(0))
    """Memory that the copies of the operands span; 0 means 256 on a CPU, 512 on a GPU."""
    again: int = option(0, whole(0, 100))
    """Times that a ranking is repeated if its winner has a small margin."""

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> TorchOptions:
        """Raises ValueError with every fault."""
        return parse_options(cls, "torch", raw)


def _families(options: Mapping[str, Any]) -> tuple[str, ...]:
    from worker.families import computed_by  # here: a command's help reads the specs, and no family

    return computed_by("torch")


def _factor(options: Mapping[str, Any]) -> float:
    return float(options.get("budget_s_per_shape") or DEFAULT_BUDGET_S) / DEFAULT_BUDGET_S


SPEC = TunerSpec(
    name="torch",
    tuner_class="worker.tuners.torch.tuner:TorchTuner",
    software="torch",
    parse_options=TorchOptions.parse,
    families=_families,
    slower_families={"a4w4_blockscale": 1.5},  # multiplied on unpacked copies
    cost_factor=_factor,
    flags=(Flag("budget_s_per_shape", "--budget", float, "Seconds that a shape may take.", metavar="SECONDS"), AGAIN),
    produces="own",
    mixes=True,
)
