"""Tuner `numpy`: a16w16 on the CPU by numpy or plain Python; an example of a third party's tuner."""

from __future__ import annotations

import random
import statistics
import struct
import time
from collections.abc import Callable, Mapping
from typing import Any

from worker.device import identify
from worker.protocol import Row, Spec, SpecShape
from worker.tuners.base import Emit, Place
from worker.tuners.catalog import CostGuess, TunerSpec

Matrix = list[list[float]]
Multiply = Callable[[Any, Any], Any]
REPEATS = 5
OPERATIONS = 1 << 24
"""2*M*N*K of the largest shape that plain Python is given."""


def parse(options: Mapping[str, Any]) -> int:
    """The number of timed runs of a candidate. Raises ValueError."""
    if unknown := set(options) - {"repeats"}:
        raise ValueError(f"unknown option {', '.join(map(repr, sorted(unknown)))} (there are repeats)")
    repeats = options.get("repeats", REPEATS)
    if isinstance(repeats, bool) or not isinstance(repeats, int) or not 1 <= repeats <= 1000:
        raise ValueError(f"repeats is {repeats!r}, not a whole number from 1 to 1000")
    return repeats


class NumpyTuner:
    """Times the candidates of a shape one after the other, on the cores of its slot."""

    def __init__(self) -> None:
        self._repeats = REPEATS
        self._numpy: Any = None

    def configure(self, options: Mapping[str, Any], place: Place) -> None:
        self._repeats = parse(options)

    def open(self) -> dict[str, Any]:
        try:
            import numpy
        except ImportError:
            version = "0"  # plain Python it is
        else:
            self._numpy, version = numpy, numpy.__version__
        here = identify()
        return {**{k: here[k] for k in ("gfx", "cu_num", "device")}, "versions": {"numpy": version}}

    def canary(self) -> tuple[bool, float, str]:
        """2 x 2 by 2 x 2 with a known product."""
        began = time.perf_counter()
        ok = by_rows([[1.0, 2.0], [3.0, 4.0]], [[1.0, 0.0], [2.0, 1.0]]) == [[1.0, 4.0], [3.0, 10.0]]
        return ok, (time.perf_counter() - began) * 1e6, "2x2x2"

    def tune(self, spec: Spec, emit: Emit) -> dict[str, float]:
        began = time.perf_counter()
        for shape in spec.shapes:
            emit.started(shape.id)
            self._tune_shape(spec, shape, emit)
        return {"measure": time.perf_counter() - began}

    def _tune_shape(self, spec: Spec, shape: SpecShape, emit: Emit) -> None:
        m, n, k = (int(shape.key[c]) for c in ("M", "N", "K"))
        types = {str(shape.key.get(c, "torch.bfloat16")) for c in ("dtype", "outdtype")}
        if spec.family != "a16w16" or types != {"torch.bfloat16"} or shape.key.get("bias", "False") != "False":
            emit.failed(shape.id, "unsupported", "only a16w16 in bfloat16 without bias")
            return
        candidates = self._candidates()
        if self._numpy is None and 2 * m * n * k > OPERATIONS:
            emit.failed(shape.id, "unsupported", "too large for plain Python, and numpy is not installed")
            return
        rng = random.Random(f"{m} {n} {k}")
        x, w = ([[bf16(rng.gauss(0.0, 1.0)) for _ in range(k)] for _ in range(rows)] for rows in (m, n))
        reference = by_rows(x, w) if self._numpy is None else self._numpy.array(x) @ self._numpy.array(w).T
        best: Row | None = None
        for number, (name, prepare, multiply) in enumerate(candidates):
            a, b = prepare(x), prepare(w)
            out = multiply(a, b)
            error = error_ratio(out, reference, m, n)
            samples = []
            for _ in range(self._repeats):
                began = time.perf_counter()
                multiply(a, b)
                samples.append((time.perf_counter() - began) * 1e6)
                emit.alive()
            us = max(1e-3, statistics.median(samples))
            row: Row = {
                "kernelId": number, "splitK": 0, "kernelName": f"numpy_{name}", "libtype": "numpy", "us": us,
                "tflops": 2 * m * n * k / us / 1e6, "bw": 2 * (m * k + n * k + m * n) / us / 1e3,
                "errRatio": error, "status": "ok" if error <= spec.err_ratio else "wrong", "samples": len(samples),
            }  # fmt: skip
            emit.row(shape.id, row)
            if row["status"] == "ok" and (best is None or us < best["us"]):
                best = row
        if best is None:
            emit.failed(shape.id, "wrong_result", "no candidate is right")
        else:
            emit.tuned(shape.id, best)

    def _candidates(self) -> list[tuple[str, Callable[[Matrix], Any], Multiply]]:
        """(name, how an operand is prepared, the multiplication x @ w.T) of each."""
        np = self._numpy
        if np is None:
            return [("python_rows", list, by_rows), ("python_columns", list, by_columns)]
        return [
            ("float32", lambda a: np.array(a, dtype=np.float32), lambda x, w: x @ w.T),
            ("float64", np.array, lambda x, w: x @ w.T),
            ("einsum", lambda a: np.array(a, dtype=np.float32), lambda x, w: np.einsum("mk,nk->mn", x, w)),
        ]


def by_rows(x: Matrix, w: Matrix) -> Matrix:
    """x @ w.T, one output row after the other."""
    return [[sum(a * b for a, b in zip(row, column, strict=True)) for column in w] for row in x]


def by_columns(x: Matrix, w: Matrix) -> Matrix:
    """x @ w.T, one output column after the other."""
    columns = [[sum(a * b for a, b in zip(row, column, strict=True)) for row in x] for column in w]
    return [list(row) for row in zip(*columns, strict=True)]


def bf16(value: float) -> float:
    """The value with the 16 upper bits of its float32."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0] & 0xFFFF0000
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def error_ratio(out: Any, reference: Any, m: int, n: int) -> float:
    """Share of elements beyond 1e-2 + 1e-2 * |reference|."""
    wrong = sum(
        abs(float(out[i][j]) - float(reference[i][j])) > 1e-2 + 1e-2 * abs(float(reference[i][j]))
        for i in range(m)
        for j in range(n)
    )
    return wrong / (m * n)


SPEC = TunerSpec(
    name="numpy",
    tuner_class="gemmfleet_numpy:NumpyTuner",
    parse_options=parse,
    cost_guess=CostGuess(0.1, 0.1, 1e-9, 1e-7, 3.0),
    produces="own",
    worker_package="gemmfleet_numpy",
)
