"""Registry entry and options of the tuner `vllm`: config files of vLLM's own Triton kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from worker.registry import parse_options
from worker.tuners.catalog import AGAIN, Flag, TunerSpec
from worker.tuners.search.source import SearchOptions, cost_factor

if TYPE_CHECKING:
    from worker.tuners.base import Tuner

NAME = "vllm"
FAMILIES = ("a8w8_blockscale", "fmoe")


def create() -> Tuner:
    """A tuner that has not been opened."""
    from worker.tuners.vllm.tuner import EngineTuner

    return EngineTuner()


SPEC = TunerSpec(
    name=NAME,
    create=create,
    software="vllm",
    parse_options=lambda raw: parse_options(SearchOptions, NAME, raw),
    families=lambda options: FAMILIES,
    cost_factor=cost_factor,
    wants_family=True,
    wants_counts=True,
    flags=(
        Flag("search", "--search", str, "Search: fast (the default) or exhaustive.", metavar="HOW"),
        Flag("budget_s_per_shape", "--budget", float, "Seconds that a shape may take.", metavar="SECONDS"),
        AGAIN,
    ),
    produces="configs",
    unit=lambda family, key: "",  # one file holds all M
    mixes=True,
    version=lambda name, device: f"{device.get('engine') or ''} triton {device.get('triton') or ''}".strip(),
)
