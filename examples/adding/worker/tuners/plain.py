"""Tuner `plain`: a GEMM of ones in plain Python, as rows and as columns."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from worker.device import identify
from worker.protocol import Row, Spec
from worker.tuners.base import Emit, Place
from worker.tuners.catalog import CostGuess, Flag, TunerSpec


def parse(options: Mapping[str, Any]) -> int:
    """Number of timed runs. Raises ValueError."""
    rounds = options.get("rounds", 3)
    if set(options) - {"rounds"} or not isinstance(rounds, int) or rounds < 1:
        raise ValueError("the tuner plain has one option, rounds: a whole number from 1 on")
    return rounds


class PlainTuner:
    """Times sums over K."""

    def configure(self, options: Mapping[str, Any], place: Place) -> None:
        self._rounds = parse(options)

    def open(self) -> dict[str, Any]:
        here = identify()
        return {**{name: here[name] for name in ("gfx", "cu_num", "device")}, "versions": {"plain": "1"}}

    def canary(self) -> tuple[bool, float, str]:
        return sum([1.0] * 8) == 8.0, 1.0, "a sum of eight"

    def tune(self, spec: Spec, emit: Emit) -> dict[str, float]:
        began = time.perf_counter()
        for shape in spec.shapes:
            emit.started(shape.id)
            m, n, k = (int(shape.key[name]) for name in "MNK")
            rows: list[Row] = []
            for number, (outer, inner) in enumerate(((m, n), (n, m))):
                start = time.perf_counter()
                for _ in range(self._rounds):
                    out = [[sum([1.0] * k) for _ in range(inner)] for _ in range(outer)]
                    emit.alive()
                us = (time.perf_counter() - start) / self._rounds * 1e6
                wrong = sum(cell != k for row in out for cell in row) / (m * n)
                name = "plain_rows" if number == 0 else "plain_columns"
                rows.append(
                    {
                        "kernelId": number,
                        "kernelName": name,
                        "libtype": "plain",
                        "us": us,
                        "errRatio": wrong,
                        "tflops": 2 * m * n * k / us / 1e6,
                        "status": "ok",
                    }
                )
                emit.row(shape.id, rows[-1])
            emit.tuned(shape.id, min(rows, key=lambda row: row["us"]))
        return {"measure": time.perf_counter() - began}


SPEC = TunerSpec(
    name="plain",
    tuner_class="worker.tuners.plain:PlainTuner",
    parse_options=parse,
    cost_guess=CostGuess(0.1, 0.1, 1e-8, 0.0, 1.0),
    flags=(Flag("rounds", "--rounds", int, "Timed runs of a candidate.", minimum=1),),
    produces="own",
)
