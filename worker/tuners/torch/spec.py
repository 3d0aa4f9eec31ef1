"""Registry entry of the tuner `torch`: real GEMM candidates on any CPU or GPU that torch runs on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from worker.tuners.catalog import Flag, TunerSpec

if TYPE_CHECKING:
    from worker.tuners.base import Tuner

DEFAULT_BUDGET_S = 3.5


def create() -> Tuner:
    """A tuner that has not been opened."""
    from worker.tuners.torch.tuner import TorchTuner

    return TorchTuner()


def _parse(options: Mapping[str, Any]) -> object:
    from worker.tuners.torch.options import Options

    return Options.parse(options)


def _factor(options: Mapping[str, Any]) -> float:
    return float(options.get("budget_s_per_shape") or DEFAULT_BUDGET_S) / DEFAULT_BUDGET_S


SPEC = TunerSpec(
    name="torch",
    create=create,
    parse_options=_parse,
    slower_families={"a4w4_blockscale": 1.5},  # multiplied on unpacked copies
    cost_factor=_factor,
    flags=(Flag("budget_s_per_shape", "--budget", float, "Seconds that a shape may take.", metavar="SECONDS"),),
    produces="own",
)
