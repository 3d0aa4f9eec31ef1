"""AITER's own Triton kernels compiled for gfx950 on a CPU, through its wrappers, and what a spill looks like."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from orchestrator.image.image_files import TRITON
from tests.aiter.checkout import needs_checkout, take_out
from tests.paths import ROOT
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
    values = {**resolver.config_for(BY_NAME[kind], m, 1280, 8192, b).values, **more}
    facts = compile_config(kind, "gfx950", values, (b, m, 1280, 8192), root=root, caller=caller)
    print(json.dumps([facts.shared_bytes, facts.vgprs, facts.spills]))
"""


def test_every_kind_and_fused_operator_that_is_measured_compiles_without_a_gpu(tmp_path: Path) -> None:
    """The last two have the change of pull request #5137 to a16w16's default file, without which Triton 3.9 spills."""
    take_out("e4048607a5", tmp_path, *TRITON, "aiter/jit/core.py")
    fused = [(k.name, 32, {"caller": c.function}) for k in BY_NAME.values() for c in k.callers if c.is_callable]
    assert len(fused) == 4
    changed = [("a16w16", m, {"waves_per_eu": 4}) for m in (8, 256)]
    jobs = [*((kind, 32, {}) for kind in tuned_kinds()), *fused, *changed]
    argv = [sys.executable, "-W", "ignore", "-c", CODE, str(tmp_path), json.dumps(jobs)]
    env = {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(found) == len(jobs)
    assert all(0 < lds <= 163840 and 0 < vgprs <= 512 for lds, vgprs, _ in found)
    assert [spills for _, _, spills in found[-2:]] == [0, 0]
