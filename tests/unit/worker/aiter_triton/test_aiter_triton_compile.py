"""A wrapper compiled for gfx950 without a device, as a process of the pool does it, on a stand-in tree."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.paths import ROOT
from tests.standins.triton_tree import make, values

pytestmark = pytest.mark.skipif(not find_spec("triton"), reason="there is no Triton")
CODE = """
import json, sys
from dataclasses import replace
from worker.triton_configs.kinds import BY_NAME
from worker.tuners.aiter_triton.space import config_of
from worker.tuners.aiter_triton.space import problem_of
from worker.tuners.aiter_triton.source import AiterSource, CompileJob
from worker.tuners.aiter_triton.space import least_shared_bytes
from worker.tuners.search.compiling import compile_candidate
from worker.tuners.search.source import copies_async, known
root, arch = sys.argv[1], sys.argv[2]
target = known(int(arch) if arch.isdigit() else arch)
target = replace(target, async_copy=target.backend == "hip" and copies_async(arch))
key = {"M": 20, "N": 64, "K": 4096, "dtype": "torch.bfloat16", "outdtype": "torch.bfloat16"}
p = problem_of("a16w16", "a16w16", key, target.gfx)
case = p.case
for values in json.loads(sys.argv[3]):
    job = CompileJob(case, tuple(values.items()), sys.argv[4])
    status, detail, *facts = compile_candidate(AiterSource(root, "a16w16"), target, job)
    least = least_shared_bytes(BY_NAME["a16w16"], p, config_of(values), target)
    print(json.dumps([status, detail, *([f.shared_bytes, f.vgprs, f.spills, repr(f.same_as), least] for f in facts)]))
"""


FUSED = "fused_gemm_a16w16_quant_x"


def compiled(tree: Path, arch: str, configs: list[dict[str, Any]], caller: str = "") -> list[list[Any]]:
    """(status, detail, [LDS, registers, spills, what it is the same as, LDS that is expected at least]) of configs,
    compiled in a fresh process."""
    argv = [sys.executable, "-W", "ignore", "-c", CODE, str(tree), arch, json.dumps(configs), caller]
    env = {"TRITON_CACHE_DIR": str(tree / "cache"), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


def test_facts_come_from_the_compiled_kernel(tmp_path: Path) -> None:
    tree = make(tmp_path, {"DEFAULT.json": {"any": values(amd=True)}}, "gfx950")
    plain = values(32, 64, 128, amd=True)
    configs = [plain, {**plain, "NUM_KSPLIT": 2}, {**plain, "GROUP_SIZE_M": 8}, {**plain, "BLOCK_SIZE_K": 24}]
    huge = values(256, 256, 128, amd=True, num_stages=3, num_warps=8)
    first, split, grouped, broken, large = compiled(tree, "gfx950", [*configs, huge])
    assert first[:2] == split[:2] == ["ok", ""]
    assert 0 < first[2][0] <= 163840
    assert 0 < first[2][1] <= 512
    assert first[2][3] == grouped[2][3], "this kernel has no order of tiles: the same machine code, started alike"
    assert first[2][3] != split[2][3]
    assert broken[0] == "error"
    assert "power of 2" in broken[1]
    assert (large[0], len(large)) == ("unsupported", 2)
    assert "bytes of shared memory, 163840 are there" in large[1]


def test_the_compiler_takes_the_shared_memory_that_is_expected_and_little_more(tmp_path: Path) -> None:
    tree = make(tmp_path, {"DEFAULT.json": {"any": values(amd=True)}}, "gfx950")
    configs = [values(32, 64, 128, amd=True, num_stages=stages) for stages in (1, 2, 3)]
    for status, _, (lds, *_, least) in compiled(tree, "gfx950", configs):
        assert status == "ok"
        assert least <= lds <= 1.1 * least


@pytest.mark.full
def test_a_fused_operator_is_compiled_by_its_own_code(tmp_path: Path) -> None:
    tree = make(tmp_path, {"DEFAULT.json": {"any": values(amd=True)}}, "gfx950", fused=True)
    one, other = (compiled(tree, "gfx950", [values(amd=True)], caller)[0] for caller in ("", FUSED))
    assert one[0] == other[0] == "ok"
    (missing,) = compiled(make(tmp_path / "old", {}, "gfx950"), "gfx950", [values(amd=True)], FUSED)
    assert missing[0] == "unsupported"
    assert "no module aiter.ops.triton.gemm.fused" in missing[1]


@pytest.mark.full
def test_a_chip_of_nvidia_is_compiled_for_as_well(tmp_path: Path) -> None:
    tree = make(tmp_path, {"DEFAULT.json": {"any": values()}})
    good, foreign = compiled(tree, "90", [values(32, 64, 64), values(32, 64, 64, amd=True)])
    assert good[0] == "ok"
    assert good[2][1:3] == [None, 0], "its files do not say"
    assert foreign[0] == "error"
    assert "waves_per_eu" in foreign[1]
