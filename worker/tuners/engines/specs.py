"""Registry entries and options of the tuners of serving engines: config files of the engines' own Triton kernels.

`worker/tuners/vllm.py` and `sglang.py` are such entries; the registry finds a tuner by the name of its module.
"""

from __future__ import annotations

from collections.abc import Mapping

from worker.registry import parse_options
from worker.tuners.catalog import TunerSpec
from worker.tuners.search.options import SEARCH_FLAGS, SearchOptions, cost_factor


def engine_spec(
    name: str, tuner_class: str, families: tuple[str, ...], why_not: Mapping[str, str] | None = None
) -> TunerSpec:
    """The entry of the tuner that has the name of its engine."""
    return TunerSpec(
        name=name,
        tuner_class=tuner_class,
        software=name,
        parse_options=lambda raw: parse_options(SearchOptions, name, raw),
        families=lambda options: families,
        why_not=why_not or {},
        cost_factor=cost_factor,
        wants_family=True,
        wants_counts=True,
        flags=SEARCH_FLAGS,
        produces="configs",
        unit=lambda family, key: "",  # one file holds all M
        mixes=True,
        version=lambda _, device: f"{device.get('engine') or ''} triton {device.get('triton') or ''}".strip(),
    )
