"""Config sets of AITER's Triton GEMMs through the real command line: a kernel in Triton's interpreter, made-up times.

The kernel reads its config by the tree's own loader and is checked; then it leaves a time that its shape and config
decide, which the stand-in for rocprofv3 reports. So verdicts do not depend on how fast this machine is.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.kits.fleet import Bench, read_csv
from tests.standins.aiter.triton_gemm import make, values
from tests.support.files import write_files, write_program

ARCH = "def get_arch():\n    return 90\n"
CONFIGS = Path("aiter/ops/triton/configs/90/triton/gemm/gemm_a16w16")
TIMED = """
    with open("stand-in.us", "w") as f:
        f.write(str({(64, 16): 20, (64, 32): 30, (32, 16): 40, (32, 32): 25}[N, config["BLOCK_SIZE_M"]]))
    return y
"""
ROCPROF = """#!/usr/bin/env python3
import os, sys
folder = sys.argv[sys.argv.index("-d") + 1]
ns = 1000 * int(open("stand-in.us").read()) + os.getpid() % 7
os.makedirs(folder)
lines = ["Kind,Kernel_Name,Start_Timestamp,End_Timestamp"]
lines += [f"KERNEL_DISPATCH,stand_in_gemm,{i * 90000},{i * 90000 + ns}" for i in range(31)]
open(folder + "/bench_kernel_trace.csv", "w").write("\\n".join(lines) + "\\n")
"""
OLD = {"M_LEQ_16": values(16), "any": values(16)}
NEW = {"M_LEQ_16": values(32), "any": values(32)}


def config_set(folder: Path, files: dict[str, object]) -> Path:
    """A tree with config files only."""
    return write_files(folder, {str(CONFIGS / name): json.dumps(buckets) for name, buckets in files.items()})


@pytest.mark.full
def test_a_harmful_default_change_is_rejected_and_a_file_of_one_shape_accepted(bench: Bench) -> None:
    root = make(bench.root / "tree", {"DEFAULT.json": OLD, "GEMM-A16W16-N=64-K=64.json": NEW})
    (root / "aiter/ops/triton/utils/_triton/arch_info.py").write_text(ARCH)
    wrapper = root / "aiter/ops/triton/gemm/basic/gemm_a16w16.py"
    wrapper.write_text(wrapper.read_text().replace("    return y\n", TIMED.lstrip("\n")))
    tool = write_program(bench.root / "bin" / "rocprofv3", ROCPROF)
    bench.inventory.write_text(
        f"defaults: {{family: a16w16}}\nnodes:\n  here:\n    gpus: 0\n    workdir: {bench.workdir}\n"
        f"    aiter: {{root: {root}}}\n    env: {{PATH: '{tool.parent}:{os.environ['PATH']}'}}\n"
    )
    half = "torch.float16"  # the interpreter takes bfloat16 for integers
    bench.shapes_csv.write_text(f"M,N,K,dtype,outdtype\n8,64,64,{half},{half}\n8,32,64,{half},{half}\n")
    old = config_set(bench.root / "old", {"DEFAULT.json": OLD})
    default = config_set(bench.root / "new", {"DEFAULT.json": NEW})
    own = config_set(bench.root / "own", {"DEFAULT.json": OLD, "GEMM-A16W16-N=32-K=64.json": NEW})
    sets = [
        w for name, at in (("old", old), ("default", default), ("own", own)) for w in ("--config-set", f"{name}={at}")
    ]
    done = bench.run(
        "bench", bench.shapes_csv, "-i", bench.inventory, "-O", "rotate_mb=1", "--timer", "rocprof", *sets,
        "--env", "stack=,TRITON_INTERPRET=1", "--json",
    ).ok()  # fmt: skip
    document = done.json()
    assert {r["backend"] for r in document["rows"]} == {"aiter-triton"}
    stacks = [(name, stack["variables"]) for name, stack in document["environments"].items()]
    assert stacks == [(name, {"TRITON_INTERPRET": "1"}) for name in ("old", "default", "own")]
    folder = bench.paths.root
    at = CONFIGS.relative_to("aiter/ops/triton/configs")
    assert {r["N"]: r["aiter_config"].split(" ")[0] for r in read_csv(folder / "own.csv")} == {
        "64": f"{at}/DEFAULT.json", "32": f"{at}/GEMM-A16W16-N=32-K=64.json",
    }  # fmt: skip
    side = json.loads((folder / "provenance.json").read_text())["options"]["sides"][2]
    assert (side["variables"], side["configs"][:7]) == ({"TRITON_INTERPRET": "1"}, "sha256:")
    assert json.loads((folder / "own.env.json").read_text())["configs"].startswith(f"{own} (2 files, sha256 ")

    judged = bench.run("compare", str(folder / "old.csv"), str(folder / "default.csv"))
    assert judged.code == 1, judged.err
    words = " ".join(judged.out.split())
    assert f"rejected: {at}/DEFAULT.json (default file, 2 rows changed, 1 slower, 1 faster)" in words
    assert "N=64 K=64" in words.partition("rejected:")[2].partition(": 20.00 -> 30.00 us, limit 20.60 us")[0]
    assert "separate files would keep the gain of N=32 K=64" in words
    judged = bench.run("compare", str(folder / "old.csv"), str(folder / "own.csv")).ok()
    assert f"accepted: {at}/GEMM-A16W16-N=32-K=64.json (1 row changed, 0 slower, 1 faster)" in judged.out
