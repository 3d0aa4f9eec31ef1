"""View of a run from its ledger: read once, and then only what was added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from orchestrator.ledger import LedgerReader
from orchestrator.planning import CostModel
from orchestrator.run.config import RunConfig
from orchestrator.run.view.model import Costs
from orchestrator.run.view.run_view import RunView
from orchestrator.run.view.status import RunHeader
from orchestrator.shapes import Shape, describe


class ViewReader:
    """`update` brings `view` up to date; `name` names a shape."""

    def __init__(self) -> None:
        self.view = RunView()
        self._read = 0
        self._keys: dict[int, tuple[int | str, ...]] | None = None

    def update(self, ledger: LedgerReader) -> RunView:
        """Read what came since the last call."""
        if self._keys is None:
            shapes = [Shape(s.id, s.key) for s in ledger.shapes()]
            self._keys = {s.id: s.key for s in shapes}
            self.view = RunView(costs_of(ledger, shapes))
        last = int(ledger.query("SELECT coalesce(max(id), 0) FROM journal")[0][0])
        if last > self._read:
            for t, record in ledger.journal_records(self._read):
                self.view.feed(t, record)
            self._read = last
        return self.view

    def name(self, shape: int) -> str:
        """Shape as the user knows it."""
        key = (self._keys or {}).get(shape)
        return describe(key) if key else f"shape {shape}"

    def about(self, ledger: LedgerReader, config: RunConfig, nodes: Mapping[str, tuple[str, ...]]) -> RunHeader:
        """Facts on a run beside its journal."""
        counts = ledger.counts()
        return RunHeader(
            config.run, config.family, config.tuner, config.created, counts.total, counts.skipped, nodes, self.name
        )


def costs_of(ledger: LedgerReader, shapes: Sequence[Shape]) -> Costs | None:
    """The estimates that the run was planned with, None where it was planned without."""
    kept = ledger.meta("cost")
    if kept is None:
        return None
    model = CostModel(**kept)
    each = model.shape_costs(shapes, ledger.family)
    return Costs(lambda i: each.get(i, 0.0), model.setup_s, model.start_s, model.spread)
