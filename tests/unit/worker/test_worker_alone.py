"""The worker needs nothing of the controller's and nothing but the standard library."""

from __future__ import annotations

import subprocess

import pytest

from tests.support.workernode import REPO, interpreters

IMPORT_ALL = """
import importlib, pkgutil, sys

class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "orchestrator":
            raise ImportError(f"the worker imports {name}")

sys.meta_path.insert(0, Forbid())
import worker
for module in pkgutil.walk_packages(worker.__path__, "worker.", onerror=lambda name: None):
    # a tuner may import what it needs, and so may a backend of bench; they too must leave the controller alone
    ours = ("base", "catalog", "replay")
    if module.name.startswith("worker.tuners.") and module.name.split(".")[2] not in ours:
        continue
    if module.name in ("worker.bench.backends", "worker.bench.measuring"):
        continue
    if module.name != "worker.__main__":
        importlib.import_module(module.name)
import worker.__main__
foreign = sorted({m.split(".")[0] for m in sys.modules} - set(sys.stdlib_module_names) - {"worker", "__main__"})
foreign = [m for m in foreign if not getattr(sys.modules.get(m), "__name__", m).startswith("_")]
print(",".join(foreign))
try:
    import orchestrator
except ImportError as e:
    print(e)
"""


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_it_imports_the_standard_library_only(version: str) -> None:
    python = interpreters().get(version)
    if python is None:
        pytest.skip(f"python{version} is not installed")
    argv = [python, "-S", "-c", IMPORT_ALL]
    done = subprocess.run(argv, cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["", "the worker imports orchestrator"]
