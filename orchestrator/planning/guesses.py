"""First guesses of what tuners take where nothing was measured yet, and by how much a run's options change that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

FIRST_SPREAD = 5.0
"""How far a first guess may be off to either side: chips, compilers and libraries that nobody has seen yet."""


@dataclass(frozen=True, slots=True)
class Guess:
    """Seconds: set-up of a group; a shape; an operation; a weight element; from the command to the first group."""

    setup_s: float
    shape_s: float
    flop_s: float
    weight_s: float
    start_s: float


# torch on a CPU of some 100 GFLOP/s: about 30 executions a shape, 3.5 s unless they are long; importing it takes some
# seconds. aiter: 53 candidates and about 12 s a shape, a pool of processes 10 to 25 s a group (AITER's own practice on
# MI300 and MI355X), modules that are built at the start. triton: 1 to 5 s a shape on an H200 beside 15 compile
# processes. bench: about a second a shape and backend there. replay: recorded rows, next to nothing.
_CPU = {
    "torch": Guess(0.2, 2.0, 1e-10, 2e-8, 8.0),
    "bench": Guess(1.0, 1.5, 1e-10, 2e-8, 8.0),
}
_GPU = {
    "torch": Guess(0.2, 1.5, 1e-13, 1e-9, 10.0),
    "aiter": Guess(15.0, 12.0, 3e-12, 3e-8, 40.0),
    "triton": Guess(0.5, 2.5, 1e-12, 1e-9, 12.0),
    "bench": Guess(1.0, 1.0, 1e-13, 1e-9, 12.0),
    "replay": Guess(0.001, 0.01, 0.0, 0.0, 1.0),
}
# Dequantised on a CPU: the multiplication runs on unpacked copies.
_FACTORS = {("torch", "a4w4_blockscale"): 1.5, ("triton", "a4w4_blockscale"): 2.0}


def first_guess(tuner: str, family: str, gfx: str) -> Guess:
    """For a GPU where the gfx is one's; an unknown tuner is taken as torch."""
    cpu = gfx.startswith("cpu") or not gfx
    guess = (_CPU.get(tuner) if cpu else None) or _GPU.get(tuner) or (_CPU if cpu else _GPU)["torch"]
    factor = _FACTORS.get((tuner, family), 1.0)
    return replace(
        guess, shape_s=factor * guess.shape_s, flop_s=factor * guess.flop_s, weight_s=factor * guess.weight_s
    )


def units(tuner: str, options: Mapping[str, Any]) -> float:
    """How many times as long a shape takes with these options: bench's backends, torch's seconds, a longer search."""
    if tuner == "bench":
        return float(max(1, len(options.get("backends") or ())) * max(1, len(options.get("envs") or ())))
    if tuner == "torch":
        return float(options.get("budget_s_per_shape") or 3.5) / 3.5
    if tuner == "triton" and options.get("search") == "exhaustive":
        return 2.0
    return 1.0
