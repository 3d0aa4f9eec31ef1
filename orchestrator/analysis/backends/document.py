"""An analysis as a JSON document and as CSV, for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, TextIO

from orchestrator.analysis.backends.statistics import LEAD, Reference, Statistics, reference_source
from orchestrator.analysis.backends.table import BackendTable, ShapeBest
from orchestrator.tables.write import no_formula


def document(table: BackendTable, stats: Statistics, references: Sequence[Reference] = ()) -> dict[str, Any]:
    """`rows` (a shape each), `summary`, `left_out`, `inputs`, `notes`; numbers not rounded, None for none."""
    rows = [_row(table, stats, i, s) for i, s in enumerate(table.shapes)]
    out: dict[str, Any] = {
        "title": table.title,
        "family": table.family.name,
        "err_ratio": table.err_ratio,
        "backends": list(table.backends),
        "rows": rows,
        "summary": _summary(table, stats),
        "left_out": {**table.left_out, "by_backend": table.left_out_of},
        "inputs": [{**asdict(f), "more": False} for f in table.inputs],
        "notes": [*table.notes, *stats.notes],
    }
    if references:
        out["reference"] = {"source": reference_source(), "rows": [_reference(r) for r in references]}
    return out


def _row(table: BackendTable, stats: Statistics, at: int, shape: ShapeBest) -> dict[str, Any]:
    won, roof = shape.winner, stats.roofs[at]
    return {
        "shape": table.key_text(shape),
        "key": dict(zip(table.family.key_names, shape.key, strict=True)),
        "gfx": shape.device[0],
        "cu_num": shape.device[1],
        "backends": {b: _best(shape, b) for b in table.backends if b in shape.best},
        "best": won.backend if won else None,
        "asm_over_best_other": shape.ratio(LEAD),
        "roofline": None if roof is None else {**roof._asdict(), "share": stats.share(at, shape)},
        "left_out": shape.left_out,
        "worst_err_ratio": max((w.err for w in shape.wrong if w.err is not None), default=None),
        "beyond_err_ratio": [
            {"backend": w.backend, "kernel": w.kernel, "err_ratio": w.err, "us": w.us} for w in shape.wrong
        ],
        "wrong_was_faster": shape.wrong_was_faster,
    }


def _best(shape: ShapeBest, backend: str) -> dict[str, Any]:
    b = shape.best[backend]
    return {"tflops": b.tflops, "us": b.us, "kernel": b.kernel, "err_ratio": b.err}


def _summary(table: BackendTable, stats: Statistics) -> dict[str, Any]:
    shares = [x for i, s in enumerate(table.shapes) if (x := stats.share(i, s)) is not None]
    return {
        "shapes": len(table.shapes),
        "wins": stats.wins,
        "pairs": [asdict(p) for p in stats.pairs],
        "asm_loses": [table.key_text(s) for s in stats.lead_loses],
        "beyond_err_ratio": [table.key_text(s) for s in stats.beyond],
        "no_backend": [table.key_text(s) for s in stats.without],
        "roofline": {
            "chips": [
                {"gfx": gfx, "cu_num": cu_num, **(asdict(chip) if chip else {"name": None})}
                for (gfx, cu_num), chip in stats.chips.items()
            ],
            "share": {"min": min(shares), "max": max(shares), "mean": sum(shares) / len(shares)} if shares else None,
        },
    }


def _reference(r: Reference) -> dict[str, Any]:
    here = {"tflops": r.measured.tflops, "us": r.measured.us, "backend": r.measured.backend} if r.measured else None
    return {
        "M": r.key[0], "N": r.key[1], "K": r.key[2], "group": r.group, "tflops": r.tflops, "us": r.us,
        "measured": here, "deviation": r.deviation, "off": r.off,
    }  # fmt: skip


def write_csv(table: BackendTable, stats: Statistics, out: TextIO) -> None:
    """A line a shape: key columns, `<backend>_tflops,<backend>_us` each, best, kernel, asm_over_best_other, roofline.

    The file can be read by `analyze` again, as a benchmark.
    """
    import pandas as pd

    measured = [f"{b}_{unit}" for b in table.backends for unit in ("tflops", "us")]
    last = ("best", "kernelName", "asm_over_best_other", "roofline_share", "rows_left_out")
    rows = []
    for i, s in enumerate(table.shapes):
        row: dict[str, object] = {"gfx": no_formula(s.device[0]), "cu_num": s.device[1]}
        row |= dict(zip(table.family.key_names, s.key, strict=True))
        for b, best in s.best.items():
            row |= {f"{b}_tflops": f"{best.tflops:.6g}", f"{b}_us": f"{best.us:.6g}"}
        if won := s.winner:
            row |= {"best": won.backend, "kernelName": no_formula(won.kernel)}
        figures = {"asm_over_best_other": s.ratio(LEAD), "roofline_share": stats.share(i, s)}
        row |= {name: f"{v:.4f}" for name, v in figures.items() if v is not None}
        rows.append({**row, "rows_left_out": sum(s.left_out.values())})
    columns = pd.Index(["gfx", "cu_num", *table.family.key_names, *measured, *last])
    pd.DataFrame(rows, columns=columns, dtype=object).to_csv(out, index=False, lineterminator="\n")
