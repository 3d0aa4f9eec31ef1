"""AITER's own Triton kernels compiled for gfx950 on a CPU, through its wrappers, and what a spill looks like."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from orchestrator.image.takeout import TRITON
from tests.aiter.checkout import needs_checkout, take_out
from worker.triton_configs.kinds import BY_NAME
from worker.tuners.aiter_triton.spec import tuned_kinds

pytestmark = [needs_checkout, pytest.mark.skipif(not find_spec("triton"), reason="there is no Triton")]
CODE = """
import json, sys
from pathlib import Path
from worker.triton_configs.kinds import BY_NAME
from worker.triton_configs.resolve import Resolver
from worker.tuners.aiter_triton.source import compile_config
root, jobs = Path(sys.argv[1]), json.loads(sys.argv[2])
resolver = Resolver(root, "gfx950")
for kind, m, more in jobs:
    b = 16 if BY_NAME[kind].batched else None
    caller = more.pop("caller", "")
    values = {**resolver.config_for(kind, m, 1280, 8192, b).values, **more}
    facts = compile_config(kind, "gfx950", values, m, 1280, 8192, b, root=root, caller=caller)
    print(json.dumps([facts.shared_bytes, facts.vgprs, facts.spills]))
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parts of AITER's package that are taken out of an image for its Triton ops."""
    root = tmp_path_factory.mktemp("aiter")
    take_out("e4048607a5", root, *TRITON, "aiter/jit/core.py")
    return root


def compiled(tree: Path, cache: Path, jobs: list[tuple[str, int, dict[str, Any]]]) -> list[list[int]]:
    """(bytes of LDS, registers, spills) of buckets of N=1280, K=8192: kind, M, values that differ."""
    argv = [sys.executable, "-W", "ignore", "-c", CODE, str(tree), json.dumps(jobs)]
    env = {"TRITON_CACHE_DIR": str(cache), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(argv, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


def test_every_kind_and_fused_operator_that_is_tuned_compiles_without_a_gpu(tree: Path, tmp_path: Path) -> None:
    callers = [(k.name, c.function) for k in BY_NAME.values() for c in k.callers if c.given is not None]
    jobs: list[tuple[str, int, dict[str, Any]]] = [(kind, 32, {}) for kind in tuned_kinds()]
    jobs += [(kind, 32, {"caller": caller}) for kind, caller in callers]
    assert len(jobs) == 11 + 4
    assert all(0 < lds <= 163840 and 0 < vgprs <= 512 for lds, vgprs, _ in compiled(tree, tmp_path, jobs))


def test_waves_per_eu_of_8_spill_where_4_do_not(tree: Path, tmp_path: Path) -> None:
    """The change of pull request #5137 to the default file of a16w16. Triton 3.6 spills in neither; 3.9 does."""
    import triton

    shipped = compiled(tree, tmp_path, [("a16w16", m, {}) for m in (8, 32, 256)])
    changed = compiled(tree, tmp_path, [("a16w16", m, {"waves_per_eu": 4}) for m in (8, 32, 256)])
    assert [spills for _, _, spills in changed] == [0, 0, 0]
    if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9):
        assert all(spills > 0 for _, _, spills in shipped)
