"""The end of a run: its results are read once, and its winners are merged into the user's table.

`end_run` comes after the controller, which has written the run's own files (`export.py`). `cli/ending.py` shows what it
returns, and changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import InputError
from orchestrator.files.write import write_atomic
from orchestrator.ledger.reader import NOT_WORTH_IT, LedgerReader
from orchestrator.pages import MOST_ROWS
from orchestrator.paths import RunConfig, RunPaths
from orchestrator.planning.worth import Gain
from orchestrator.policy.model import State
from orchestrator.results.export import candidate_rows, describe_unpromised, winner_rows
from orchestrator.results.gain import gains_over_median
from orchestrator.results.run_facts import RunFacts
from orchestrator.results.run_results import RunResults
from orchestrator.tables.merge import MergeReport, merge


@dataclass(frozen=True, slots=True)
class RunEnd:
    """A run that ended. `state`: finished, interrupted or cancelled. `results`: do not read candidates from them, the
    ledger is closed. `replayed`: the state of its nodes and attempts; `ended`: when its controller ended.

    `merge`: None without a table or a winner, or if the merge was refused; then `refusal` says why. `won`: only in a
    run with --by-value. `not_worth_it`: why shapes were left out at its limit, one text for each. `gains`: of the
    winners that a page shows, how many times as fast as the median candidate they are.
    """

    paths: RunPaths
    config: RunConfig
    state: str
    results: RunResults
    replayed: State
    ended: float | None
    merge: MergeReport | None
    refusal: InputError | None
    won: Gain | None
    not_worth_it: Sequence[str]
    gains: Mapping[int, float]

    @property
    def is_unsettled(self) -> bool:
        """True if `resume` would have work."""
        counts = self.results.counts
        return self.state != "finished" and counts.total > counts.settled

    @property
    def is_merged(self) -> bool:
        """True if the user's table has the winners."""
        return self.config.db is not None and self.refusal is None

    @property
    def unpromised(self) -> list[str]:
        """A sentence for each AITER that we do not promise to drive."""
        return describe_unpromised(self.results.slots)

    @property
    def shared_nodes(self) -> list[str]:
        """Nodes on which others had jobs during the run (--busy share)."""
        nodes = self.replayed.nodes.values()
        return sorted(node.name for node in nodes if any(state == "shared" for _, state, _ in node.history))


def end_run(paths: RunPaths, state: str) -> RunEnd:
    """Read the results of a run that ended in this state, and merge them into its table if it has one."""
    config = RunConfig.read(paths.config)
    with LedgerReader.open_readonly(paths.ledger) as ledger:
        results = RunResults.read(ledger)
        report = None
        refusal = None
        if config.db and results.winners:
            try:
                report = merge_into_table(results, paths, config)
            except InputError as e:  # the results of the run stay, and can be merged later
                refusal = e
        return RunEnd(
            paths,
            config,
            state,
            results,
            ledger.replayed,
            ledger.meta("ended"),
            report,
            refusal,
            results.won(),
            [shape.detail for shape in ledger.shapes("skipped") if shape.reason == NOT_WORTH_IT],
            gains_over_median(ledger, results.winners[:MOST_ROWS]),
        )


def merge_into_table(results: RunResults, paths: RunPaths, config: RunConfig) -> MergeReport:
    """Merge the winners into the run's table, and keep the report in the run's folder. Raises InputError."""
    report = merge(
        winner_rows(results),
        Path(str(config.db)),
        results.family,
        profile=candidate_rows(results),
        facts=RunFacts(paths.root, results),
        err_ratio=config.err_ratio,
    )
    write_atomic(paths.merge, json.dumps(report.to_json(), indent=1) + "\n")
    return report
