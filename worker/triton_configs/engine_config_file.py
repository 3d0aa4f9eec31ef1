"""Config files of vLLM and SGLang by their names, which say for which layer and device they are.

    N=2112,K=7168,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json                      a linear layer
    E=8,N=7168,device_name=NVIDIA_H200,dtype=fp8_w8a8,per_channel_quant=True_down.json                   fused experts

`config_files` lists those of a package; `EngineConfigFile.named_in` finds a name in a line of a server's log.
Nothing of the engine runs here: `serving_engine.py` asks it which name it forms, and whether it reads the file.
"""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from worker.triton_configs.engine_package import PROJECTS, EnginePackage, Layer

_NAME = re.compile(
    r"(?:\bE=(?P<experts>\d+),N=(?P<moe_n>\d+)|\bN=(?P<n>\d+),K=(?P<k>\d+)),device_name=(?P<device>[^,/]*?)"
    r"(?:,dtype=(?P<dtype>\w+?))?(?:,block_shape=\[(?P<block_n>\d+), ?(?P<block_k>\d+)\])?"
    r"(?P<rest>(?:,\w+=\w+?)*(?:_down)?)\.json"
)
HIDDEN = 4096
"""Hidden size of a MoE layer: no name says it."""
TOPK = 8
"""Experts of a token: no name says this either."""


class EngineConfigFile(NamedTuple):
    """A config file by its name. `rest`: what follows the sizes, the device, dtype and block shape, such as
    `,per_channel_quant=True_down`."""

    path: Path
    layer: Layer
    device: str
    rest: str

    @classmethod
    def from_path(cls, path: Path) -> EngineConfigFile | None:
        """None for a file that is not named as config files are."""
        return cls._from_match(path, _NAME.fullmatch(path.name))

    @classmethod
    def named_in(cls, line: str) -> EngineConfigFile | None:
        """The first file that a line names, None without one."""
        match = _NAME.search(line)
        return cls._from_match(Path(match[0] if match else ""), match)

    @classmethod
    def _from_match(cls, path: Path, match: re.Match[str] | None) -> EngineConfigFile | None:
        if match is None:
            return None
        parts = match.groupdict("")
        dtype = parts["dtype"]
        block = (int(parts["block_n"]), int(parts["block_k"])) if parts["block_n"] else None
        if parts["experts"]:
            layer = Layer("moe", int(parts["moe_n"]), HIDDEN, int(parts["experts"]), TOPK, dtype, block)
        else:
            layer = Layer("linear", int(parts["n"]), int(parts["k"]), 0, TOPK, dtype, block)
        return cls(path, layer, parts["device"], parts["rest"])

    @property
    def is_second_product(self) -> bool:
        """True for a file of SGLang that is for the second GEMM of experts alone."""
        return self.rest.endswith("_down")

    @property
    def is_per_channel(self) -> bool:
        """True if each row of W has a scale of its own."""
        return "per_channel" in self.rest


def config_files(package: EnginePackage, override: Path | None = None) -> list[EngineConfigFile]:
    """The config files of the override folder, or else of the package; those of one device in a row."""
    folders = [package.folder / folder / "configs" for folder in PROJECTS[package.project].config_folders]
    if override is not None:
        folders = [override]
    paths = chain.from_iterable(folder.rglob("*.json") for folder in folders)
    files = [file for file in map(EngineConfigFile.from_path, paths) if file]
    return sorted(files, key=lambda file: (file.device, file.path))
