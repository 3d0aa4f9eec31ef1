"""The worker needs nothing of the controller's and nothing but the standard library."""

from __future__ import annotations

import subprocess

import pytest

from tests.support.workernode import REPO, interpreters

# a tuner may import what it needs, and so may a backend of bench
IMPORT_ALL = """
import importlib, pkgutil, sys
sys.modules["orchestrator"] = None
import worker
for module in pkgutil.walk_packages(worker.__path__, "worker.", onerror=lambda name: None):
    tuner = module.name.split(".")[2:] if module.name.startswith("worker.tuners.") else []
    if tuner[:1] in ([], ["base"], ["catalog"], ["replay"]) and module.name not in (
        "worker.bench.backends", "worker.bench.measuring", "worker.__main__"
    ):
        importlib.import_module(module.name)
import worker.__main__
foreign = {m.split(".")[0] for m in sys.modules} - set(sys.stdlib_module_names) - {"worker", "orchestrator", "__main__"}
print(*(m for m in sorted(foreign) if not getattr(sys.modules.get(m), "__name__", m).startswith("_")))
"""


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_it_imports_the_standard_library_only(version: str) -> None:
    python = interpreters().get(version)
    if python is None:
        pytest.skip(f"python{version} is not installed")
    done = subprocess.run([python, "-S", "-c", IMPORT_ALL], cwd=REPO, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr
