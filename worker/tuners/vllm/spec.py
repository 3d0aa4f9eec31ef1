"""Registry entry and options of the tuner `vllm`: config files of vLLM's own Triton kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from worker.registry import parse_options
from worker.tuners.catalog import AGAIN, CostGuess, Flag, TunerSpec
from worker.tuners.search.source import SearchOptions, cost_factor

if TYPE_CHECKING:
    from worker.tuners.base import Tuner
    from worker.tuners.vllm.source import Op

NAME = "vllm"
FAMILIES = ("a8w8_blockscale", "fmoe")


def parse(raw: Mapping[str, Any]) -> SearchOptions:
    """The options, those of the search; docs/reference/tuners.md explains them. Raises ValueError with every fault."""
    return parse_options(SearchOptions, NAME, raw)


def op_of(options: SearchOptions) -> Op[Any]:
    """The kind of layer of a run. Raises ValueError where vLLM has none for the family."""
    from worker.tuners.vllm.linear import Linear  # they import torch
    from worker.tuners.vllm.moe import Moe

    if options.family not in FAMILIES:
        raise ValueError(f"the tuner vllm needs one of the families {', '.join(FAMILIES)}, not {options.family!r}")
    return Moe() if options.family == "fmoe" else Linear()


def create() -> Tuner:
    """A tuner that has not been opened."""
    from worker.tuners.vllm.tuner import EngineTuner

    return EngineTuner()


SPEC = TunerSpec(
    name=NAME,
    create=create,
    parse_options=parse,
    families=lambda options: FAMILIES,
    cost_guess=CostGuess(5.0, 4.0, 4e-12, 4e-9, 25.0),
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
