"""Registry entries and options of the tuners of serving engines: config files of the engines' own Triton kernels.

`worker/tuners/vllm.py` and `sglang.py` are such entries; the registry finds a tuner by the name of its module.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from worker.registry import boolean, option, parse_options, text
from worker.tuners.catalog import Flag, TunerSpec
from worker.tuners.search.options import SEARCH_FLAGS, SearchOptions, cost_factor

CAPTURED = "captured"
"""The label of routings that a server had (`LayerProblem.captured`)."""
MOST_CAPTURES = 16
"""Captured routings of a run: each copy of the operands is routed by one of them."""
TOPK_IDS = Flag(
    "topk_ids", "--topk-ids", str, "Also measure routings that a server had, from SGLang's captures.", metavar="DIR"
)


def captured_rule(value: Any) -> tuple[tuple[int, ...], ...]:
    """Rule: a text of the tokens of each expert, a list for each captured routing: `[[512, 38, 0, ...], ...]`."""
    try:
        routings = json.loads(text(value)) if value else []
        counts = tuple(tuple(routing) for routing in routings)
    except (ValueError, TypeError, RecursionError):
        counts = ((),)
    is_legal = len(counts) <= MOST_CAPTURES and len({len(routing) for routing in counts}) <= 1
    if not is_legal or not all(map(_is_routing, counts)):
        raise ValueError(f"not up to {MOST_CAPTURES} lists of the tokens of each expert")
    return counts


def _is_routing(counts: tuple[Any, ...]) -> bool:
    return all(type(count) is int and 0 <= count < 1 << 31 for count in counts) and any(counts)


@dataclass(frozen=True, slots=True)
class EngineOptions(SearchOptions):
    """The options of the search, and the routings that a mixture of experts is measured with."""

    # The folder of a server's captures. gemmfleet reads it, and sets `captured` instead.
    topk_ids: str = option("", text)
    captured: tuple[tuple[int, ...], ...] = option((), captured_rule)
    captured_only: bool = option(False, boolean)  # no drawn routings beside the captured ones

    def with_captured(self, drawn: tuple[str, ...]) -> tuple[str, ...]:
        """The labels of drawn routings, and that of the captured ones beside or instead of them."""
        if not self.captured:
            return drawn
        if self.captured_only:
            return (CAPTURED,)
        return (*drawn, CAPTURED)


def parse_engine_options(tuner: str, raw: Mapping[str, Any]) -> EngineOptions:
    """The options of an engine's tuner. Raises ValueError, also if captured routings alone are wanted and none are
    named."""
    options = parse_options(EngineOptions, tuner, raw)
    if options.captured_only and not (options.captured or options.topk_ids):
        raise ValueError("captured_only: there are no captured routings; name their folder with --topk-ids DIR")
    return options


def engine_spec(
    name: str, tuner_class: str, families: tuple[str, ...], why_not: Mapping[str, str] | None = None
) -> TunerSpec:
    """The entry of the tuner that has the name of its engine."""
    return TunerSpec(
        name=name,
        tuner_class=tuner_class,
        software=name,
        parse_options=partial(parse_engine_options, name),
        families=lambda options: families,
        why_not=why_not or {},
        cost_factor=cost_factor,
        wants_family=True,
        wants_counts=True,
        wants_captures=True,
        flags=(*SEARCH_FLAGS, TOPK_IDS),
        produces="configs",
        unit=lambda family, key: "",  # one file holds all M
        mixes=True,
        version=lambda _, device: f"{device.get('engine') or ''} triton {device.get('triton') or ''}".strip(),
    )
