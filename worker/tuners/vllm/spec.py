"""Registry entry and options of the tuner `vllm`: config files of vLLM's own Triton kernels."""

from __future__ import annotations

from worker.registry import parse_options
from worker.tuners.catalog import TunerSpec
from worker.tuners.search.options import SEARCH_FLAGS, SearchOptions, cost_factor

NAME = "vllm"
FAMILIES = ("a8w8_blockscale", "fmoe")


SPEC = TunerSpec(
    name=NAME,
    tuner_class="worker.tuners.vllm.tuner:EngineTuner",
    software="vllm",
    parse_options=lambda raw: parse_options(SearchOptions, NAME, raw),
    families=lambda options: FAMILIES,
    cost_factor=cost_factor,
    wants_family=True,
    wants_counts=True,
    flags=SEARCH_FLAGS,
    produces="configs",
    unit=lambda family, key: "",  # one file holds all M
    mixes=True,
    version=lambda name, device: f"{device.get('engine') or ''} triton {device.get('triton') or ''}".strip(),
)
