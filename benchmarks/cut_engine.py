"""Cuts vLLM or SGLang down to what measuring needs: a few Python files and all configs, 3 MB instead of 300.

    python -m benchmarks.cut_engine ROOT_OR_WHEEL FOLDER

The Python files are those that are opened while the engine is loaded and asked. The folder is an engine for `load`,
so it can be carried to a GPU machine that has torch and Triton only.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from worker.triton_configs.engine_package import PROJECTS, EngineDevice, Layer, locate_engine, unpack_wheel
from worker.triton_configs.serving_engine import load_engine

DEVICES = (EngineDevice("NVIDIA H200", 90), EngineDevice("AMD Instinct MI300X", "gfx942"))
LAYERS = (
    Layer("linear", 2112, 7168, dtype="fp8_w8a8", block=(128, 128)),
    Layer("moe", 256, 7168, e=256, topk=8, dtype="fp8_w8a8", block=(128, 128)),
)


def cut(root: Path, folder: Path) -> list[Path]:
    """Write the files of the engine at `root` that are needed below `folder`; returns them, below its package."""
    _, package, _ = locate_engine(root)
    needed = {file for file in opened_by_loading(package) if file.is_relative_to(package)}
    for at in PROJECTS[package.name].config_folders:
        needed |= set((package / at / "configs").rglob("*.json"))
    for file in needed:
        to = folder / file.relative_to(package.parent)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, to)
    return sorted(file.relative_to(package) for file in needed)


def opened_by_loading(package: Path) -> set[Path]:
    """Files that are read while the engine is loaded for NVIDIA's and AMD's, and asked for configs."""
    opened: list[Any] = []
    # a hook stays for the life of the process, so it is told when to stop
    recording = [True]
    sys.addaudithook(lambda event, args: opened.append(args[0]) if event == "open" and recording else None)
    for device in DEVICES:
        engine = load_engine(package, device)
        for layer in LAYERS:
            engine.config(layer, 16)
        # a process keeps what it compiled, so files that it loaded before are not opened again
        opened += [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    recording.clear()
    return {Path(name) for name in opened if isinstance(name, str)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        is_wheel = given.root.suffix == ".whl"
        files = cut(unpack_wheel(given.root, Path(scratch)) if is_wheel else given.root, given.folder)
    print(*(file for file in files if file.suffix == ".py"), sep="\n")
    print(f"{len(files)} files, {sum(f.stat().st_size for f in given.folder.rglob('*.*')) / 2**20:.1f} MiB")
