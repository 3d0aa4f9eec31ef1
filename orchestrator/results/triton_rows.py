"""Rows that route shapes to AITER's Triton kernel, of a bench in which it beat every other backend.

AITER's tuner of such a family has no Triton candidate (bf16's has: it times `auto` itself).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from orchestrator.command_hints import command
from orchestrator.errors import InputError
from orchestrator.ledger.reader import LedgerReader
from orchestrator.paths import RunPaths
from orchestrator.results.bench import Result, results
from worker.families import Cell, Family
from worker.text import plural

ROUTED = {"a8w8_blockscale_bpreshuffle": "gemm_a8w8_blockscale_preshuffle"}
"""Wrapper that the dispatch calls for libtype and kernelName `triton`; source: gemm_op_a8w8.py at e4048607a5."""
OURS, TODAY = "aiter-triton", "aiter"


def triton_rows(run: RunPaths) -> tuple[Family, list[dict[str, Cell]], list[str]]:
    """(family, rows by the columns of its table, sentences on the shapes without one) of a bench.

    Raises InputError for a run of another family, or of several stacks.
    """
    with LedgerReader.open_readonly(run.ledger) as ledger:
        family, found = ledger.family, results(ledger)
        chips = {(r.shape, r.node, r.slot): {"gfx": r.gfx, "cu_num": r.cu_num or ""} for r in ledger.profile_rows()}
    if family.name not in ROUTED:
        names = ", ".join(ROUTED)
        raise InputError(
            f"{run.run}: is of {family.name}; shapes are routed to Triton in {names} (bf16's tuner does so)"
        )
    if len({r.env for r in found}) != 1 or not any(r.backend == TODAY for r in found):
        bench = command(f"bench SHAPES.csv -b {TODAY},{OURS} --family {family.name}")
        raise InputError(f"{run.run}: is no bench of one stack with AITER's dispatch in it: {bench}")
    rows, without = [], Counter[str]()
    for _, mine in groupby(found, key=lambda r: r.shape):
        winner, why = _judged(list(mine), ROUTED[family.name])
        if winner is None:
            without[why] += 1
            continue
        key = dict(zip(family.key_names, winner.key, strict=True))
        chip = chips[winner.shape, winner.node, winner.slot]
        values = {
            "libtype": "triton", "kernelName": "triton", "kernelId": 0, "splitK": 0, "us": round(winner.us, 4),
            "tflops": round(winner.tflops, 2), "bw": round(winner.bw, 2), "errRatio": winner.err or 0.0,
        }  # fmt: skip
        rows.append({**{n: chip[n] for n in family.chip_columns}, **key, **family.row_to_columns(values)})
    return family, rows, [f"{plural(n, 'shape')} without a row: {why}" for why, n in without.items()]


def _judged(mine: Sequence[Result], op: str) -> tuple[Result | None, str]:
    """(the Triton kernel's result where every run of it was faster than every other backend's, else why not)."""
    triton = next((r for r in mine if r.backend == OURS and r.op == op and r.status == "ok"), None)
    others = [r for r in mine if r.backend != OURS and r.runs]
    if triton is None:
        return None, f"{OURS} has no result of {op} that agrees with itself"
    if not any(r.backend == TODAY for r in others):
        return None, "AITER's dispatch has no time to compare with"
    if max(us for _, us in triton.runs) < min(us for r in others for _, us in r.runs):
        return triton, ""
    return None, "another backend was as fast in some run"
