"""Rates of tuners, measured on a chip and shipped with gemmfleet: the first guess, until a user's own runs are known.

A chip without a line here is not guessed: how long a first run takes there is not known, and the plan says so. To add a
line, tune eight lists of different sizes on the chip, and fit the formula of orchestrator/planning/cost.py to them.
"""

from __future__ import annotations

from typing import NamedTuple


class Rate(NamedTuple):
    """Seconds of a tuner on a chip. `chip`: its gfx, or `cpu`. `family`: "" for all without a line of their own.

    `setup_s`: of a group, without imports. `shape_s`, `flop_s`, `weight_s`: of a shape, an operation and a weight
    element. `start_s`: from the command to the first group, with imports. `source`: where and how it was measured.
    """

    tuner: str
    chip: str
    family: str
    setup_s: float
    shape_s: float
    flop_s: float
    weight_s: float
    start_s: float
    source: str


H200 = "measured on one NVIDIA H200"
XEON = "measured on two cores of a Xeon"

RATES = (
    # benchmarks/results/torch-tuner.md: 36 shapes in 96 s
    Rate("torch", "cpu", "", 0.2, 2.0, 1e-10, 2e-8, 8.0, XEON),
    # benchmarks/results/controller.md: 0.1 to 0.4 s a shape, jobs of 2 to 8 shapes in 7 to 9 s
    Rate("torch", "sm_90", "", 0.2, 0.5, 1e-13, 1e-9, 6.0, H200),
    Rate("bench", "cpu", "", 1.0, 1.5, 1e-10, 2e-8, 8.0, XEON),
    # benchmarks/results/controller.md: jobs of 2 to 8 shapes in 19 to 26 s; a second a shape and backend
    Rate("bench", "sm_90", "", 1.0, 1.0, 1e-13, 1e-9, 12.0, H200),
    # benchmarks/results/aiter-triton.md: 12 shapes in 42 s; the raw file beside it: 3 to 8 s a shape
    Rate("aiter-triton", "sm_90", "", 2.0, 2.5, 1e-12, 1e-9, 15.0, H200),
    # benchmarks/results/vllm-configs.md: 23 files of 18 M in 23 to 231 s, 6 MoE layers of 6 M in 39 to 119 s
    Rate("vllm", "sm_90", "", 3.0, 1.8, 3e-11, 0.0, 25.0, H200),
    Rate("vllm", "sm_90", "fmoe", 3.0, 10.0, 1e-10, 0.0, 25.0, H200),
    # benchmarks/results/sglang-configs.md: 2 or 3 M of four layers in 36 to 81 s
    Rate("sglang", "sm_90", "fmoe", 3.0, 18.0, 1e-10, 0.0, 25.0, H200),
    # nobody measured this one: it only says which work is long, and that a group's set-up is
    Rate("aiter", "none", "", 15.0, 12.0, 3e-12, 3e-8, 40.0, ""),
)


def nearest_rate(tuner: str, family: str, gfx: str) -> tuple[Rate, bool]:
    """The shipped rate that is most like it, and whether it was measured with this tuner on this chip.

    A rate of another chip, or else of the tuner `torch`, is good enough to begin with the longest work.
    """
    chip = "cpu" if gfx.startswith("cpu") else gfx
    of_tuner = [rate for rate in RATES if rate.tuner == tuner] or RATES[:1]
    rate = max(of_tuner, key=lambda rate: (rate.chip == chip, rate.family == family))
    return rate, (rate.tuner, rate.chip) == (tuner, chip)
