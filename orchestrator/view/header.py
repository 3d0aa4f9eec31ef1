"""Facts about a run that are not in its state: what was asked for, and what its plan expected."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from orchestrator.ledger.reader import LedgerReader
from orchestrator.paths import RunConfig
from orchestrator.shapes.model import describe

NameOfShape = Callable[[int], str]
"""Gives the name of a shape, such as `16x1280x8192`, by its id."""
SPREAD = 5.0
"""The spread of estimates if there is no model: the true time may be this many times longer or shorter."""


@dataclass(frozen=True, slots=True)
class RunHeader:
    """Facts about a run that are not in its state. `nodes`: slots of each node of the inventory. `named`: gives a
    shape's name. `start_s`, `spread`, `known`: from the cost model of its plan.
    """

    run: str
    family: str
    tuner: str
    created: float
    total: int
    skipped: int
    nodes: Mapping[str, tuple[str, ...]]
    named: NameOfShape
    start_s: float = 0.0
    spread: float = SPREAD
    known: bool = True

    @classmethod
    def of(cls, ledger: LedgerReader, config: RunConfig, nodes: Mapping[str, tuple[str, ...]]) -> RunHeader:
        """The header of a run in a ledger."""
        cost = ledger.meta("cost", {})
        return cls(
            run=config.run,
            family=config.family,
            tuner=config.tuner,
            created=config.created,
            total=len(ledger.keys),
            skipped=len(ledger.skipped()),
            nodes=nodes,
            named=names_of(ledger),
            start_s=cost.get("start_s", 0.0),
            spread=cost.get("spread", SPREAD),
            known=cost.get("known", True),
        )


def names_of(ledger: LedgerReader) -> NameOfShape:
    """Names of a run's shapes as the user knows them."""
    keys = ledger.keys
    return lambda shape: describe(keys[shape]) if shape in keys else f"shape {shape}"
