"""Winners that are ASM kernels with split-K, where AITER's maintainers would take a CK kernel (`tuned_db.split_k`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from orchestrator.ledger.reader import LedgerReader
from orchestrator.tuned_db.split_k import CK, COMMIT
from worker.text import and_more, plural

SHOWN = 4
_CLOSE = f"""SELECT s.id, w.us, w.split_k, r.us, r.kernel_name FROM shapes s JOIN rows w ON w.id = s.row
    JOIN rows r ON r.attempt = w.attempt AND r.shape = w.shape
    WHERE s.state = 'tuned' AND w.libtype = 'asm' AND w.split_k >= 1 AND r.libtype IN {CK} AND r.status = 'ok'
    AND r.us > 0 AND r.us - w.us <= ? ORDER BY s.id, r.us DESC"""


@dataclass(frozen=True, slots=True)
class CloseCk:
    """A winner and the fastest CK kernel of its attempt; times in microseconds."""

    us: float
    split_k: int
    ck_us: float
    ck_kernel: str
    limit: float

    def __str__(self) -> str:
        return (
            f"The winner is an ASM kernel with split-K (splitK {self.split_k}, {self.us:g} us). AITER's maintainers"
            f" keep CK within {self.limit:g} us of such ({COMMIT}), here {self.ck_kernel[:160]} with {self.ck_us:g} us;"
            " gemmfleet takes the fastest, as AITER's tuner does"
        )


def close_ck(ledger: LedgerReader) -> dict[int, CloseCk]:
    """By shape; empty for families whose tables know no such preference."""
    limit = ledger.family.aiter.ck_within_us
    if not limit:
        return {}
    rows = ledger.query(_CLOSE, (limit,))
    return {shape: CloseCk(us, split, ck_us, kernel, limit) for shape, us, split, ck_us, kernel in rows}


def close_ck_note(found: Mapping[int, CloseCk], name: Callable[[int], str]) -> str:
    """Sentence on all of them at a run's end, "" where there are none. `name`: that of a shape."""
    if not found:
        return ""
    limit = next(iter(found.values())).limit
    shapes = and_more([name(i) for i in found], SHOWN)
    return (
        f"{plural(len(found), 'winner is an ASM kernel', 'winners are ASM kernels')} with split-K, with CK at most"
        f" {limit:g} us behind ({shapes}): AITER's maintainers keep CK there ({COMMIT}); explain SHAPE names the kernel"
    )
