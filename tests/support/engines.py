"""vLLM and SGLang for tests: their real Python files and configs, from wheels in ~/.cache/gemmfleet-tests/wheels.

With SYSTEM=1 pip downloads the wheels once (375 MB) if they are not there. Their .py and config files are unpacked
once.

    @pytest.mark.parametrize("project", ENGINES)
    def test_it(project: str) -> None:
        root = tree(project)       # skips, with a reason, where there is no wheel
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from worker.triton_configs.engine_package import PROJECTS, EngineDevice, unpack_wheel
from worker.triton_configs.serving_engine import load_engine

CACHE = Path(os.environ.get("GEMMFLEET_TEST_CACHE", "~/.cache/gemmfleet-tests")).expanduser()
ENGINES = {"vllm": "0.33.0", "sglang": "0.5.23"}
H200 = EngineDevice("NVIDIA H200", 90)
MI300X = EngineDevice("AMD Instinct MI300X", "gfx942")
MI355X = EngineDevice("AMD Instinct MI355X", "gfx950")


def wheel(project: str) -> Path:
    """The wheel of a project; skips the test if it cannot be had."""
    version = ENGINES[project]
    folder = CACHE / "wheels"
    found = sorted(folder.glob(f"{project}-{version}-*.whl"))
    if not found and os.environ.get("SYSTEM"):
        argv = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
        subprocess.run([*argv, f"{project}=={version}"], check=False, timeout=900)
        found = sorted(folder.glob(f"{project}-{version}-*.whl"))
    if not found:
        pytest.skip(f"no wheel of {project} {version} in {folder}: SYSTEM=1 downloads it")
    return found[0]


@cache
def tree(project: str) -> Path:
    """Folder with the package's .py and config files, as an unpacked wheel has them. Tests only read it; see `copy`."""
    pytest.importorskip("triton", reason="Triton is not installed")
    folder = CACHE / "engines" / f"{project}-{ENGINES[project]}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "engines.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            half = folder.with_name(f"{folder.name}.half")
            shutil.rmtree(half, ignore_errors=True)
            unpack_wheel(wheel(project), half)
            half.rename(folder)
    return folder


def copy(project: str, folder: Path) -> Path:
    """A tree of one's own: the files that are loaded and all configs, below `folder`."""
    root = tree(project)
    load_engine(root, H200)
    executed = [Path(str(sys.modules[module].__file__)) for module in PROJECTS[project].executed]
    for file in (*executed, root / project / "_version.py"):
        _copied(file, root, folder)
    for at in PROJECTS[project].config_folders:
        for file in (root / project / at / "configs").rglob("*.json"):
            _copied(file, root, folder)
    return folder


def copy_without_files(folder: Path) -> Path:
    """A tree of vLLM of one's own, without config files."""
    root = folder / "engine"
    shutil.copytree(tree("vllm"), root, ignore=shutil.ignore_patterns("*.json"))
    linear_folder(root).mkdir(exist_ok=True)
    return root


def linear_folder(root: Path) -> Path:
    """The folder of vLLM's files of linear layers."""
    return root / "vllm" / PROJECTS["vllm"].config_folders[0] / "configs"


def linear_file(n: int, k: int, device: str = "NVIDIA_H200") -> str:
    """The name of vLLM's file of a linear layer."""
    return f"N={n},K={k},device_name={device},dtype=fp8_w8a8,block_shape=[128,128].json"


def config_values(m: int = 16, n: int = 64, k: int = 128, **more: int) -> dict[str, int]:
    """A config of either engine's kernels."""
    tile = {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": k, "GROUP_SIZE_M": 1}
    return {**tile, "num_warps": 4, "num_stages": 2, **more}


def ask_here(env: Mapping[str, str], question: Callable[..., Any], *args: Any) -> Any:
    """In place of `ask_engine`: the same answer in this process, which has imported torch already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VLLM_TUNED_CONFIG_FOLDER", raising=False)
        for name, value in env.items():
            patch.setenv(name, value)
        return question(*args)


def _copied(file: Path, root: Path, folder: Path) -> None:
    to = folder / file.relative_to(root)
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, to)
