"""Registry entry and options of the tuner `vllm`: config files of vLLM's own Triton kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from worker.registry import option, parse_options, text
from worker.tuners.catalog import AGAIN, CostGuess, Flag, TunerSpec
from worker.tuners.search.source import COUNTS, SearchOptions, cost_factor

if TYPE_CHECKING:
    from worker.tuners.base import Tuner
    from worker.tuners.vllm.source import Op

NAME = "vllm"
FAMILIES = ("a8w8_blockscale",)


@dataclass(frozen=True, slots=True)
class Options(SearchOptions):
    """Those of the search, and further ones; docs/reference/tuners.md explains them."""

    family: str = option("", text)  # the run's family, set by gemmfleet
    root: str = option("", text)  # vLLM's folder or wheel, where it is not the one that Python would import
    # Calls of the workload by shape (`16x1280x8192`), set by gemmfleet from the column `count`.
    counts: tuple[tuple[str, float], ...] = option((), COUNTS)

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Options:
        """Raises ValueError with every fault."""
        return parse_options(cls, NAME, raw)


def op_of(options: Options) -> Op:
    """The kind of layer of a run. Raises ValueError where vLLM has none for the family."""
    from worker.tuners.vllm.linear import Linear  # it imports torch

    if options.family not in FAMILIES:
        raise ValueError(f"the tuner vllm needs one of the families {', '.join(FAMILIES)}, not {options.family!r}")
    return Linear()


def create() -> Tuner:
    """A tuner that has not been opened."""
    from worker.tuners.vllm.tuner import EngineTuner

    return EngineTuner()


SPEC = TunerSpec(
    name=NAME,
    create=create,
    parse_options=Options.parse,
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
