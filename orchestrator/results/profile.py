"""The profile of a run as a table: per shape the winner, its gain over the median candidate, and if it is noisy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from orchestrator.ledger.reader import LedgerReader
from worker.text import plural

if TYPE_CHECKING:
    import pandas as pd

_CANDIDATES = """SELECT r.shape, r.us, r.kernel_name, r.libtype, r.tflops, r.attempt, r.status, r.id = s.row
    FROM rows r JOIN shapes s ON s.id = r.shape WHERE s.state = 'tuned'"""
NOISY_GAIN = 0.995
"""A winner with a gain below it (1.00x as shown) is noisy: measured again, it was slower than the median candidate."""
MOST_NAMED = 4
COLUMNS = ("shape", "us", "kernelName", "libtype", "tflops", "attempt", "status", "winner")


def profile_frame(ledger: LedgerReader, shapes: Sequence[int] | None = None) -> pd.DataFrame:
    """The candidates of tuned shapes (of `shapes` alone, if given), in the order of arrival (columns: COLUMNS).

    us is -1 where there is no time; `winner` marks the rows that settled a shape.
    """
    import pandas as pd

    only = "" if shapes is None else f" AND s.id IN ({', '.join(map(str, map(int, shapes)))})"
    frame = pd.DataFrame(ledger.query(f"{_CANDIDATES}{only} ORDER BY r.id"), columns=pd.Index(COLUMNS))
    return frame.astype({"winner": bool})


def best_per_shape(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per tuned shape, by shape id: us, kernelName, tflops, candidates, median_us, gain.

    `candidates` are those of the settling attempt that were right (status ok), as they were first measured, and
    `median_us` is their median; `gain` = median_us / us (1.0: the choice made no difference), NaN where the winner
    was the only one.
    """
    right = frame[(frame["us"] > 0) & (frame["status"] == "ok")]
    best = right[right["winner"]].set_index("shape").sort_index()
    beside = right[~right["winner"] & (right["attempt"] == right["shape"].map(best["attempt"]))]
    times = beside.groupby("shape")["us"]
    out = best[["us", "kernelName", "tflops"]].copy()
    out["candidates"] = times.size().reindex(out.index, fill_value=0)
    out["median_us"] = times.median().reindex(out.index)
    out["gain"] = out["median_us"] / out["us"]
    return out


def gains(ledger: LedgerReader, shapes: Sequence[int]) -> dict[int, float]:
    """The gain over the median candidate of each of these shapes that has other candidates."""
    found = best_per_shape(profile_frame(ledger, shapes))["gain"].dropna()
    return dict(zip(found.index.tolist(), found.tolist(), strict=True))


def noise_note(shapes: Sequence[str]) -> str:
    """Return a sentence on the noisy winners of these shapes, "" where there are none.

    The leaders are measured again before one wins. A leader that is then slower than the median candidate was at first
    shows a disturbed machine: neither its time nor the choice can be trusted.
    """
    if not shapes:
        return ""
    more = f" and {len(shapes) - MOST_NAMED} more" if len(shapes) > MOST_NAMED else ""
    return (
        f"{plural(len(shapes), 'winner is', 'winners are')} noisy, not to be trusted: measured again, slower than the"
        f" median candidate ({', '.join(shapes[:MOST_NAMED])}{more}); tune {'it' if len(shapes) == 1 else 'them'} again"
        " on a quiet machine"
    )
