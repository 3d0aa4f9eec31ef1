"""The profile of a run as a table: per shape the winner and what it gains over the median candidate."""

from __future__ import annotations

import pandas as pd

from orchestrator.ledger.reader import LedgerReader

_CANDIDATES = """SELECT r.shape, r.us, r.kernel_name, r.libtype, r.tflops, r.bw, r.err_ratio, r.spread, r.samples,
    r.node, r.slot, r.attempt, r.status, r.id = s.row
    FROM rows r JOIN shapes s ON s.id = r.shape ORDER BY r.id"""
# fmt: off
COLUMNS = (
    "shape", "us", "kernelName", "libtype", "tflops", "bw", "errRatio", "spread", "samples",
    "node", "slot", "attempt", "status", "winner",
)
# fmt: on


def profile_frame(ledger: LedgerReader) -> pd.DataFrame:
    """Every candidate (columns: COLUMNS; us -1 where there is no time). `winner` marks the rows that
    settled a shape."""
    frame = pd.DataFrame(ledger.query(_CANDIDATES), columns=pd.Index(COLUMNS))
    frame["winner"] = frame["winner"].fillna(0).astype(bool)
    return frame


def best_per_shape(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per tuned shape, by shape id: us, kernelName, tflops, candidates, median_us, gain.

    `median_us` is over the candidates that were right (status ok) as they were first measured, one per
    kernel name and library; `gain` = median_us / us (1.0: the choice made no difference). NaN where
    nothing else was measured.
    """
    right = frame[(frame["us"] > 0) & (frame["status"] == "ok")]
    first = right[~right["winner"]].drop_duplicates(["shape", "attempt", "libtype", "kernelName"])
    by_shape = first.groupby("shape")["us"]
    best = right[right["winner"]].set_index("shape").sort_index()
    out = best[["us", "kernelName", "tflops"]].copy()
    out["candidates"] = by_shape.size().reindex(out.index).fillna(0).astype(int)
    out["median_us"] = by_shape.median().reindex(out.index)
    out["gain"] = out["median_us"] / out["us"]
    return out
