"""Winners ranked again with their runners-up on a second GPU: which are drawn, and how far the two GPUs agree.

The choice is drawn by the run's id. Only times of one session are compared: the *regret* is the winner's time over that
of the second GPU's own choice, both measured there, less 1.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from orchestrator.events import Confirm
from orchestrator.ledger import LedgerReader, ProfileRow
from orchestrator.shapes import describe
from worker.text import plural

SHARE = 0.05
"""Share of a run's shapes that is drawn."""


@dataclass(frozen=True, slots=True)
class SecondLook:
    """A winner on a second GPU. `regret`: None, and `why`, where it could not be judged there; places as node, slot."""

    shape: int
    key: tuple[int | str, ...]
    first: tuple[str, str]
    second: tuple[str, str]
    kernel: str
    other: str
    """The second GPU's choice."""
    regret: float | None
    why: str = ""

    @property
    def agreed(self) -> bool:
        """Return whether both GPUs choose the same kernel."""
        return self.kernel == self.other


def drawn(shapes: Sequence[int], seed: str, share: float) -> frozenset[int]:
    """The nearest whole number to `share` of the shapes, drawn by `seed`: the same for the same seed and shapes."""
    order = sorted(shapes, key=lambda s: hashlib.sha256(f"{seed}:{s}".encode()).digest())
    return frozenset(order[: math.floor(share * len(order) + 0.5)])


def second_looks(ledger: LedgerReader) -> list[SecondLook]:
    """Every winner that another slot was asked to rank again, in the order of the shapes."""
    asked: dict[int, str] = {}
    for _, record in ledger.journal_records(only=Confirm):
        if isinstance(record, Confirm) and record.second:
            asked[record.shape] = record.child
    groups = {a.id: a.group for a in ledger.attempts()} if asked else {}
    out = []
    for winner in ledger.winners() if asked else ():
        if winner.shape in asked:
            rows = [r for r in ledger.profile_rows(winner.shape) if groups.get(r.attempt) == asked[winner.shape]]
            out.append(_look(winner, rows))
    return out


def _look(first: ProfileRow, rows: Sequence[ProfileRow]) -> SecondLook:
    places = (first.node, first.slot), (rows[-1].node, rows[-1].slot) if rows else ("", "")
    chosen = next((r for r in reversed(rows) if r.winner), None)
    again = next((r for r in reversed(rows) if _same(r, first) and r.us > 0), None)
    regret, why = None, ""
    if chosen is None:
        why = "no second GPU ranked it"
    elif (chosen.gfx, chosen.cu_num) != (first.gfx, first.cu_num):
        why = "the second GPU is of another kind"
    elif again is None:
        why = "the winner has no time there"
    else:
        regret = 0.0 if _same(chosen, first) else max(0.0, again.us / chosen.us - 1.0)
    other = chosen.kernel_name if chosen is not None else ""
    return SecondLook(first.shape, first.key, *places, first.kernel_name, other, regret, why)


def _same(a: ProfileRow, b: ProfileRow) -> bool:
    return (a.libtype, a.kernel_name, a.kernel_id, a.split_k) == (b.libtype, b.kernel_name, b.kernel_id, b.split_k)


def figures(looks: Sequence[SecondLook]) -> dict[str, Any]:
    """asked, judged, agreed; median and largest regret as shares (None where nothing was judged), and the looks."""
    regrets = [x.regret for x in looks if x.regret is not None]
    return {
        "asked": len(looks),
        "judged": len(regrets),
        "agreed": sum(x.regret is not None and x.agreed for x in looks),
        "median_regret": median(regrets) if regrets else None,
        "largest_regret": max(regrets, default=None),
        "shapes": [{**asdict(x), "shape": describe(x.key), "key": list(x.key)} for x in looks],
    }


def second_gpu_words(looks: Sequence[SecondLook]) -> str:
    """Sentence on the agreement of GPUs, "" where no winner was to be ranked twice."""
    if not looks:
        return ""
    of = figures(looks)
    left = f"; {len(looks) - of['judged']} could not be" if of["judged"] < len(looks) else ""
    if not of["judged"]:
        return f"{plural(len(looks), 'winner')} drawn to be ranked on a second GPU, and none could be"
    worst = max((x for x in looks if x.regret is not None), key=lambda x: x.regret or 0.0)
    at = f" ({describe(worst.key)})" if worst.regret else ""
    return (
        f"{of['agreed']} of {plural(of['judged'], 'winner')} ranked again on a second GPU came first there, too; regret"
        f" {100 * of['median_regret']:.1f} % in the median, {100 * of['largest_regret']:.1f} % at most{at}{left}"
    )
