"""The package of a serving engine (vLLM, SGLang) on disk: where it lies, what lies in it, for which GPU and layer.

`locate_engine` finds the package, `unpack_wheel` takes it out of a wheel, `detect_device` names this machine's GPU as
the engine does. Nothing of the engine is imported here; `serving_engine.py` runs its code. Another engine would be an
entry of PROJECTS, with what its modules ask for in `engine_modules.py`.
Read from vLLM 0.33.0 and SGLang 0.5.23. Importing this module imports neither torch nor triton.
"""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from worker.text import clean

OVERRIDE = "VLLM_TUNED_CONFIG_FOLDER"
"""The variable of vLLM that names an override folder: MoE files in it count before those of the package."""
INSTALL = "pip install '.[triton,torch]' in a checkout of gemmfleet"
"""The way out where torch or triton is missing."""
VLLM_IMPORT_S = 300
"""Seconds that the import of an installed vLLM may take."""


class ServingEngineError(ValueError):
    """The folder holds no engine, or one that cannot be loaded or asked."""


@dataclass(frozen=True, slots=True)
class EngineDevice:
    """A GPU as an engine sees it."""

    name: str
    """The name that the engine's platform reports, such as `NVIDIA H200`."""
    arch: int | str
    """90, or `gfx950`."""
    triton: str = ""
    """The version of Triton there, which names SGLang's folders; "": this process's, or vLLM does not ask."""

    def to_document(self) -> dict[str, Any]:
        """The fields that are set, for records."""
        return {name: value for name, value in asdict(self).items() if value != ""}

    @property
    def backend(self) -> str:
        """`cuda` or `hip`."""
        return "cuda" if isinstance(self.arch, int) else "hip"

    @property
    def capability(self) -> tuple[int, int]:
        """Major and minor number as torch reports them: (9, 0), and (9, 5) for gfx950."""
        if isinstance(self.arch, int):
            return divmod(self.arch, 10)
        return int(self.arch[3:-2]), int(self.arch[-2], 16)

    @property
    def fp8(self) -> Any:
        """The torch dtype of its 8-bit floats."""
        import torch

        return torch.float8_e4m3fnuz if str(self.arch).startswith("gfx94") else torch.float8_e4m3fn


SCHEMES: dict[str, tuple[str, tuple[int, int] | None]] = {
    "QuantType.No": ("", None),
    "QuantType.per_Tensor": ("fp8_w8a8", None),
    "QuantType.per_1x128": ("fp8_w8a8", (128, 128)),
}
"""(dtype, block) in the names of files by the column q_type."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer (GEMM of a model) that has one config file.

    No file is named by the hidden size and `topk` of a moe layer, but a default config may depend on them.
    """

    op: str
    """linear or moe; moe_down for the second product of experts, whose file is SGLang's alone."""
    n: int
    """N; for moe as in the file's name."""
    k: int = 0
    """K; for moe the hidden size."""
    e: int = 0
    """Experts of a rank."""
    topk: int = 0
    dtype: str = ""
    """The word for it in file names, such as `fp8_w8a8`; "" for bf16."""
    block: tuple[int, int] | None = None
    """N and K of a block that has one scale; None without blocks."""

    @property
    def second_product(self) -> Layer:
        """The second product of these experts alone, as the look-up of SGLang knows it."""
        return replace(self, op="moe_down")

    @property
    def sizes_in_words(self) -> str:
        """Its sizes for people, without those that are not named: `E=256 N=256 K=7168 topk=8`."""
        sizes = {"E": self.e, "N": self.n, "K": self.k, "topk": self.topk}
        return " ".join(f"{name}={size}" for name, size in sizes.items() if size)

    @property
    def sizes_in_name(self) -> tuple[int, int]:
        """The sizes in its file's name: (N, K), or (experts, N)."""
        return (self.e, self.n) if self.e else (self.n, self.k)

    @classmethod
    def from_key(cls, columns: Mapping[str, Any]) -> Layer:
        """The layer of a shape's key columns (families a8w8_blockscale and fmoe). A size that is not named is 0."""
        if "inter_dim" not in columns:
            return cls("linear", int(columns["N"]), int(columns["K"]), dtype="fp8_w8a8", block=(128, 128))
        scheme = str(columns["q_type"])
        dtype, block = SCHEMES.get(scheme, (scheme, None))
        n, k, experts, topk = (int(columns.get(name, 0)) for name in ("inter_dim", "model_dim", "expert", "topk"))
        return cls("moe", n, k, experts, topk, dtype, block)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Layer:
        """Read what `asdict(layer)` gave, also after JSON, which has lists for tuples."""
        fields = dict(document)
        block = fields.get("block")
        fields["block"] = tuple(block) if block else None
        return cls(**fields)


FunctionName = tuple[str, str]
"""(module, name) of a function of an engine."""


@dataclass(frozen=True, slots=True)
class EngineProject:
    """The names that we rely on in an engine's package. Modules are dotted."""

    title: str
    """The engine's name for people."""
    override: str
    """The variable for a folder of MoE files. SGLang's folder holds `configs/triton_X_Y_Z`, and is read instead of the
    package."""
    config_folders: tuple[str, str]
    """Folders below the package whose `configs` hold config files: those of linear layers, those of experts."""
    executed: tuple[str, ...]
    """The modules whose files we run, in this order."""
    fp8: str
    """The one of them with launcher and kernel of linear layers."""
    moe: str
    """The one with those of experts."""
    moe_lookup: str
    """The one with the look-up of MoE configs."""
    linear_launcher: str
    """In the module `fp8`."""
    linear_kernel: str
    """In the module `fp8`."""
    moe_launcher: str
    """In the module `moe`."""
    moe_dtype: FunctionName
    """The function that gives the dtype of a MoE layer as file names have it."""
    further_lookups: tuple[FunctionName, ...]
    """Look-ups of layers that we check the files of, and do not tune."""


_VLLM = "vllm.model_executor.layers"
_VLLM_FP8 = f"{_VLLM}.quantization.utils.fp8_utils"
_VLLM_MOE = f"{_VLLM}.fused_moe.fused_moe"
_SGLANG_MOE = "sglang.srt.layers.moe"
_SGLANG_FP8 = "sglang.kernels.ops.gemm.fp8_kernel"
_SGLANG_LOOKUP = f"{_SGLANG_MOE}.moe_runner.triton_utils.fused_moe_triton_config"
_SGLANG_KERNELS = "sglang.kernels.ops.moe.fused_moe_triton_kernels"
PROJECTS = {
    "vllm": EngineProject(
        title="vLLM",
        override=OVERRIDE,
        config_folders=("model_executor/layers/quantization/utils", "model_executor/layers/fused_moe"),
        executed=(
            "vllm.envs",
            "vllm.utils.math_utils",
            "vllm.utils.platform_utils",
            "vllm.triton_utils.allocation",
            _VLLM_FP8,
            f"{_VLLM}.fused_moe",
            f"{_VLLM}.fused_moe.utils",
            _VLLM_MOE,
        ),
        fp8=_VLLM_FP8,
        moe=_VLLM_MOE,
        moe_lookup=_VLLM_MOE,
        linear_launcher="w8a8_triton_block_scaled_mm",
        linear_kernel="_w8a8_triton_block_scaled_mm",
        moe_launcher="invoke_fused_moe_triton_kernel",
        moe_dtype=(f"{_VLLM}.fused_moe.config", "_get_config_dtype_str"),
        further_lookups=((f"{_VLLM}.fused_moe.fused_flydsl_moe", "try_get_optimal_config"),),
    ),
    "sglang": EngineProject(
        title="SGLang",
        override="SGLANG_MOE_CONFIG_DIR",
        config_folders=("kernels/ops/gemm", "srt/layers/moe/moe_runner/triton_utils"),
        executed=(
            "sglang.srt.environ",
            f"{_SGLANG_MOE}.utils",
            f"{_SGLANG_MOE}.moe_runner.triton_utils",
            _SGLANG_LOOKUP,
            _SGLANG_FP8,
            _SGLANG_KERNELS,
        ),
        fp8=_SGLANG_FP8,
        moe=_SGLANG_KERNELS,
        moe_lookup=_SGLANG_LOOKUP,
        linear_launcher="w8a8_block_fp8_matmul_triton",
        linear_kernel="_w8a8_block_fp8_matmul",
        moe_launcher="invoke_fused_moe_kernel",
        moe_dtype=(_SGLANG_LOOKUP, "get_config_dtype_str"),
        further_lookups=(
            (_SGLANG_FP8, "get_w8a8_channelwise_fp8_configs"),
            ("sglang.kernels.ops.gemm.int8_kernel", "get_w8a8_block_int8_configs"),
        ),
    ),
}


class EnginePackage(NamedTuple):
    """A package folder: `("vllm", Path(".../site-packages/vllm"), "0.33.0")`. `version`: "" if unknown."""

    project: str
    folder: Path
    version: str


def packages_in(root: Path) -> list[EnginePackage]:
    """The packages of engines: `root` is the folder of one, or holds it (a checkout, site-packages, what `unpack_wheel`
    made). What counts is what lies in a folder: one of the name `vllm` may be of another project."""
    packages: list[EnginePackage] = []
    for project, names in PROJECTS.items():
        for folder in (root, root / project, root / "python" / project):
            if (folder / names.config_folders[-1]).is_dir():
                packages.append(EnginePackage(project, folder.absolute(), _version_in(folder)))
    return packages


def locate_engine(root: Path, project: str | None = None) -> EnginePackage:
    """The package in a folder (`packages_in`). `project`: the one to take of several.

    Raises ServingEngineError if `root` holds no engine, and if it holds both and `project` names neither.
    """
    packages = packages_in(root)
    if project and len(packages) > 1:
        packages = [package for package in packages if package.project == project]
    if not packages:
        raise ServingEngineError(
            f"{root} holds neither vLLM nor SGLang: name a checkout, site-packages or the package folder"
        )
    if len(packages) > 1:
        folders = ", ".join(str(package.folder) for package in packages)
        raise ServingEngineError(f"{root} holds both: name one of {folders}")
    return packages[0]


def _version_in(package: Path) -> str:
    file = package / "_version.py"
    if not file.is_file():
        return ""
    version = re.search(r"^(?:__version__ = )?version = ['\"]([^'\"]+)", file.read_text(), re.MULTILINE)
    return version[1] if version else ""


def unpack_wheel(wheel: Path, folder: Path) -> Path:
    """Write the Python files and configs of a wheel below `folder`; returns `folder`. Raises ServingEngineError."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if _is_needed(name)])
    except (OSError, zipfile.BadZipFile) as e:
        raise ServingEngineError(f"{wheel} cannot be read as a wheel: {e}") from e
    return folder


def _is_needed(name: str) -> bool:
    return name.endswith(".py") or ("/configs/" in name and name.endswith(".json"))


_PRINT_NAME = "from vllm.platforms import current_platform as p; print('name:', p.get_device_name(0), sep='')"


def detect_device(root: Path) -> tuple[EngineDevice, str]:
    """The first GPU of this process, and who told its name: `vllm.platforms` if vLLM runs here from `root`, else
    `torch`.

    Config files carry this name. NVIDIA's driver tells vLLM and torch the same one. For AMD's GPUs vLLM has names of
    its own: a server would not find files with torch's. Raises ServingEngineError then, and without a GPU.
    """
    import torch

    if not torch.cuda.is_available():
        raise ServingEngineError("torch sees no GPU here")
    properties: Any = torch.cuda.get_device_properties(0)
    is_amd = torch.version.hip is not None
    arch: int | str = 10 * properties.major + properties.minor
    if is_amd:
        arch = properties.gcnArchName.split(":")[0]
    package = locate_engine(root)
    if package.project == "vllm":
        try:
            return EngineDevice(_ask_vllm_for_the_name(package.folder), arch), "vllm.platforms"
        except ServingEngineError:
            if is_amd:
                raise
    return EngineDevice(properties.name, arch), "torch"


def _ask_vllm_for_the_name(package: Path) -> str:
    """The GPU's name as the vLLM of this package folder says it. Raises ServingEngineError."""
    command = [sys.executable, "-c", _PRINT_NAME]
    try:
        done = subprocess.run(
            command, cwd=package.parent, capture_output=True, text=True, timeout=VLLM_IMPORT_S, check=False
        )
    except subprocess.TimeoutExpired:
        reason = f"no answer within {VLLM_IMPORT_S} s"
    else:
        name = re.search(r"^name:(.+)", done.stdout, re.MULTILINE)
        if name:
            return name[1]
        last_line = "".join(done.stderr.splitlines()[-1:])
        reason = clean(last_line, 300) or f"it ended with code {done.returncode}"
    raise ServingEngineError(
        f"vLLM in {package} does not tell this GPU's name, which its config files carry ({reason}); use the Python that"
        f' vLLM is installed for. To try it: python -c "{_PRINT_NAME}"'
    )
