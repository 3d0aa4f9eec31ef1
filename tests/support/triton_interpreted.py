"""Runs our Triton kernels in Triton's interpreter and prints what came out, one JSON line a case.

A program of its own (`python -m tests.support.triton_interpreted`): TRITON_INTERPRET must be set before triton is
imported, and other tests of the same process compile.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace

from worker.families.triton_config import KernelConfig
from worker.tuners.common.problem import Problem

BF16, FP8, FNUZ, INT8 = "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "int8"
WHOLE = KernelConfig(16, 32, 32)
SPLIT = replace(WHOLE, split_k=3)
SWAP = replace(WHOLE, swap=True)
DESC = replace(WHOLE, descriptor=True)
LOOP = replace(WHOLE, persistent=True)
A16 = Problem("a16w16", 1, 19, 45, 72, BF16)
A8 = Problem("a8w8", 1, 19, 45, 80, FP8, scale="row")
BLOCKS = Problem("a8w8_blockscale", 1, 19, 141, 272, FP8, scale="block")
MX = Problem("a4w4_blockscale", 1, 19, 45, 160, "float4_e2m1fn_x2", scale="mx")
BATCHED = Problem("batched_bf16", 3, 19, 45, 72, BF16)
BATCHED8 = Problem("batched_a8w8", 2, 19, 45, 80, INT8, scale="row")
BIAS = replace(A16, bias=True, outdtype="float32")
SIDE = KernelConfig(16, 32, 32, descriptor=True, side=16)
STORED = KernelConfig(128, 128, 32, descriptor=True)

CASES: dict[str, tuple[Problem, KernelConfig]] = {
    "one tile a program": (A16, WHOLE),
    "odd K, one row": (replace(A16, m=1, k=37), WHOLE),
    "K below a block": (replace(A16, k=5), WHOLE),
    "float16": (replace(A16, dtype="float16", outdtype="float16"), WHOLE),
    "bias": (BIAS, WHOLE),
    "bias, split": (BIAS, SPLIT),
    "group order": (replace(A16, m=70), replace(WHOLE, group_m=2)),
    "split": (A16, SPLIT),
    "split and swapped": (BIAS, replace(SWAP, split_k=2)),
    "swapped": (A16, SWAP),
    "descriptors": (A16, DESC),
    "descriptors, split": (A16, replace(DESC, split_k=2)),
    "columns beside": (replace(A16, n=101), SIDE),
    "columns beside, split, bias": (replace(BIAS, n=101), replace(SIDE, split_k=3)),
    "columns beside, by row, batched": (replace(BATCHED8, n=101), replace(SIDE, split_k=2)),
    "stored through a descriptor": (replace(BIAS, m=150, n=136), STORED),
    "the same, columns beside, split": (replace(A16, m=150, n=200), replace(STORED, side=32, split_k=2)),
    "the same, persistent": (replace(A16, m=150, n=136), replace(STORED, persistent=True)),
    "the same, in halves": (replace(A16, m=70, n=264), KernelConfig(64, 256, 64, persistent=True, descriptor=True)),
    "persistent": (replace(A16, m=35), LOOP),
    "persistent, descriptors, bias": (BIAS, replace(LOOP, descriptor=True)),
    "persistent, in halves": (replace(BIAS, n=300, outdtype=BF16), KernelConfig(64, 256, 64, persistent=True)),
    "fp8 by row": (A8, WHOLE),
    "fp8 by row, split": (A8, SPLIT),
    "fp8 by row, persistent": (A8, LOOP),
    "fp8 of gfx942": (replace(A8, dtype=FNUZ), WHOLE),
    "fp8 by tensor": (replace(A8, scale="tensor"), WHOLE),
    "int8 by row": (replace(A8, dtype=INT8), SPLIT),
    "int8 by tensor, persistent": (replace(A8, dtype=INT8, scale="tensor"), LOOP),
    "scale blocks": (BLOCKS, KernelConfig(16, 64, 128)),
    "scale blocks, split, swapped": (BLOCKS, KernelConfig(16, 64, 128, split_k=2, swap=True)),
    "scale blocks, descriptors": (BLOCKS, KernelConfig(32, 128, 128, descriptor=True)),
    "MXFP4": (MX, KernelConfig(16, 32, 64)),
    "MXFP4, split": (MX, KernelConfig(16, 32, 64, split_k=3)),
    "batched": (BATCHED, WHOLE),
    "batched, split, descriptors": (BATCHED, replace(DESC, split_k=2)),
    "batched, persistent": (BATCHED, replace(LOOP, descriptor=True)),
    "batched int8": (BATCHED8, SPLIT),
    "batched int8, persistent": (BATCHED8, LOOP),
}

SHORT = (
    "one tile a program",
    "split",
    "descriptors",
    "columns beside",
    "stored through a descriptor",
    "scale blocks",
    "MXFP4",
    "batched",
)
"""Cases that are run once more with one tile less."""


def main() -> None:
    """Each case twice on one workspace that is full of NaN but for its counters.

    Those of SHORT run once more with a tile left out.
    """
    import torch

    from worker.tuners.common.operands import poison
    from worker.tuners.search.target import known
    from worker.tuners.triton import launch, operands

    target = replace(known(90), sms=3)
    cpu = torch.device("cpu")
    workspace = torch.full((4 * launch.COUNTERS + (1 << 20),), 255, dtype=torch.uint8)
    workspace[: 4 * launch.COUNTERS] = 0
    for name, (p, c) in CASES.items():
        o = operands.make(p, cpu, 7)
        right, out = operands.reference(o), operands.out_like(p, cpu)
        plan = launch.plan(p, c, target)
        wrong = []
        calls = [plan, plan]
        if name in SHORT:
            calls.append(replace(plan, grid=(plan.grid[0] - 1, *plan.grid[1:])))
        for made in calls:
            poison([out])
            launch.bind(made, launch.compile_plan(made, target), o, out, workspace)()
            wrong.append(operands.check(out, right))
        left = int(workspace[: 4 * launch.COUNTERS].sum())
        print(json.dumps({"case": name, "wrong": wrong, "counters": left, "size": float(right.std())}), flush=True)


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
    main()
