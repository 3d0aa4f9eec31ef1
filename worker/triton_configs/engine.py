"""vLLM and SGLang: the config files that they read, and the kernels that these are for, asked of the engine's own code.

`load` runs the unchanged files of look-ups, launchers and kernels in this process. Only what a server knows by itself
is ours: the device, and that the server has no special mode. Read from vLLM 0.33.0 and SGLang 0.5.23.
Importing this module imports neither torch nor triton.
"""

from __future__ import annotations

import builtins
import functools
import hashlib
import importlib
import logging
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple, NoReturn, TypeVar

from worker.foreign.runner import Limits, call
from worker.text import clean

Values = dict[str, Any]
Names = Mapping[str, Any]
T = TypeVar("T")
OVERRIDE = "VLLM_TUNED_CONFIG_FOLDER"
"""The variable of vLLM that names an override folder: MoE files in it count before those of the package."""
INSTALL = "pip install '.[triton,torch]' in a checkout of gemmfleet"
"""The way out where torch or triton is missing."""
ASK_S = 300
"""Seconds that the import of an installed vLLM may take."""
ENGINE_LIMITS = Limits(seconds=900, memory=16 << 30)
"""Of a look-up: it imports torch and triton, which allocate much, on a machine that may be busy."""


class EngineError(ValueError):
    """The folder holds no engine, or one that cannot be loaded or asked."""


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU as an engine sees it. `name`: as its platform reports it, `NVIDIA H200`; `arch`: 90, `gfx950`."""

    name: str
    arch: int | str

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
        """Its format of 8 bits."""
        import torch

        return torch.float8_e4m3fnuz if str(self.arch).startswith("gfx94") else torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer (GEMM of a model) that has one config file.

    `op`: linear or moe. `n`, `k`: N and K of a linear layer. For moe, N as in the file's name, and the hidden size. No
    file is named by hidden size and `topk`, but a default config may depend on them. `e`: experts of a rank. `dtype`:
    as in file names, "" for bf16.
    """

    op: str
    n: int
    k: int = 0
    e: int = 0
    topk: int = 0
    dtype: str = ""
    block: tuple[int, int] | None = None

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Layer:
        """Read what `asdict(layer)` gave, also after JSON."""
        return cls(**{**document, "block": tuple(document["block"]) if document.get("block") else None})


class Launch(NamedTuple):
    """One launch that an engine asked for: `kernel[grid](*args, **named)`."""

    kernel: Any
    grid: Any
    args: tuple[Any, ...]
    named: Values


_V = "vllm.model_executor.layers"
_MOE = "sglang.srt.layers.moe"
# For each project: the modules that are run, and where the rest is found in them.
PARTS: dict[str, Any] = {
    "vllm": SimpleNamespace(
        executed=(
            "vllm.envs", "vllm.utils.math_utils", "vllm.utils.platform_utils", "vllm.triton_utils.allocation",
            f"{_V}.quantization.utils.fp8_utils", f"{_V}.fused_moe", f"{_V}.fused_moe.utils",
            f"{_V}.fused_moe.fused_moe",
        ),
        fp8=f"{_V}.quantization.utils.fp8_utils", moe=f"{_V}.fused_moe.fused_moe",
        moe_lookup=f"{_V}.fused_moe.fused_moe",
        launcher="w8a8_triton_block_scaled_mm", linear="_w8a8_triton_block_scaled_mm",
    ),
    "sglang": SimpleNamespace(
        executed=(
            "sglang.srt.environ", f"{_MOE}.utils", f"{_MOE}.moe_runner.triton_utils",
            f"{_MOE}.moe_runner.triton_utils.fused_moe_triton_config", "sglang.kernels.ops.gemm.fp8_kernel",
            "sglang.kernels.ops.moe.fused_moe_triton_kernels",
        ),
        fp8="sglang.kernels.ops.gemm.fp8_kernel", moe="sglang.kernels.ops.moe.fused_moe_triton_kernels",
        moe_lookup=f"{_MOE}.moe_runner.triton_utils.fused_moe_triton_config",
        launcher="w8a8_block_fp8_matmul_triton", linear="_w8a8_block_fp8_matmul",
    ),
}  # fmt: skip
# Folders below the package whose `configs` hold config files.
FOLDERS = {
    "vllm": ("model_executor/layers/quantization/utils", "model_executor/layers/fused_moe"),
    "sglang": ("kernels/ops/gemm", "srt/layers/moe/moe_runner/triton_utils"),
}


class Engine:
    """A loaded engine; `load` makes it. A process holds one, and the latest counts."""

    def __init__(self, finder: Finder, version: str, device: Device) -> None:
        self.project, self.package, self.version, self.device = finder.project, finder.package, version, device
        self._parts = PARTS[self.project]
        self.fp8: Any = sys.modules[self._parts.fp8]
        self.moe: Any = sys.modules[self._parts.moe]
        self._moe_lookup: Any = sys.modules[self._parts.moe_lookup]

    def file_name(self, layer: Layer) -> str:
        """The name of the layer's config file."""
        return self._sought(layer)[0].name

    def folders(self, layer: Layer) -> list[Path]:
        """The folders in which the engine looks for the file, in its order."""
        return [path.parent for path in self._sought(layer)]

    def table(self, layer: Layer) -> dict[int, Values] | None:
        """The entries that the engine reads for a layer, in its order; None without a file."""
        return self._look(layer, {})

    def found(self, layer: Layer) -> Path | None:
        """The file that `table` reads."""
        opened: list[Path] = []
        self._look(layer, {"open": noting(opened, open)})
        return opened[-1] if opened else None

    def config(self, layer: Layer, m: int) -> Values:
        """The config of a launch with M rows (tokens): an entry, or else the engine's default."""
        self._look(layer, {})
        if layer.op == "moe":
            w1, w2 = (layer.e, 2 * layer.n, layer.k), (layer.e, layer.k, layer.n)
            block = list(layer.block) if layer.block else None
            pick = self._moe_lookup.try_get_optimal_moe_config
            return dict(pick(w1, w2, layer.topk, layer.dtype or None, m, block_shape=block))
        launch = self.launches("linear", lambda: self.run_linear(layer, m))[0]
        return {key: value for key, value in launch.named.items() if key != "needs_masking"}

    def launches(self, op: str, call: Callable[[], Any]) -> list[Launch]:
        """The launches that `call` makes through launchers of `fp8` or `moe`. They are noted, not made."""
        from triton.runtime.jit import KernelInterface

        module = self._module(op)
        seen: list[Launch] = []
        kernels = {name: _Recorded(k, seen) for name, k in vars(module).items() if isinstance(k, KernelInterface)}
        with replaced(module, kernels):
            call()
        if not seen:
            raise EngineError(f"{self.project} {self.version} launches no Triton kernel for this on {self.device.name}")
        return seen

    def kernel(self, op: str) -> Any:
        """The Triton function that the op's config files are for."""
        return getattr(self._module(op), self._parts.linear if op == "linear" else "fused_moe_kernel")

    def source_hash(self, op: str) -> str:
        """A hash of the file with kernel and launcher."""
        return hashlib.sha256(Path(self._module(op).__file__).read_bytes()).hexdigest()[:16]

    def _module(self, op: str) -> Any:
        return self.fp8 if op == "linear" else self.moe

    def _look(self, layer: Layer, names: Names) -> dict[int, Values] | None:
        """The engine's look-up as a fresh process does it; `names` replace those of its module meanwhile."""
        bn, bk = layer.block or (0, 0)
        module, function = self.fp8, "get_w8a8_block_fp8_configs"
        args: tuple[Any, ...] = (layer.n, layer.k, bn, bk)
        if layer.op == "moe":
            module, function = self._moe_lookup, "get_moe_configs"
            args = (layer.e, layer.n, layer.dtype or None, bn, bk)
        elif layer.dtype != "fp8_w8a8" or not layer.block:
            raise EngineError(f"of linear layers only fp8_w8a8 with a block shape has config files here, not {layer}")
        lookup = getattr(module, function)
        lookup.cache_clear()
        with replaced(module, names):
            try:
                table: dict[int, Values] | None = lookup(*args)
            except Exception as e:  # whatever the engine's own code raises
                raise EngineError(f"{self.project} {self.version} fails for {layer}: {type(e).__name__}: {e}") from e
        lookup.cache_clear()
        return table

    def _sought(self, layer: Layer) -> list[Path]:
        """The paths at which the engine looks for the file."""
        sought: list[Path] = []
        path = SimpleNamespace(**{**vars(os.path), "exists": noting(sought, lambda path: False)})
        self._look(layer, {"os": SimpleNamespace(**{**vars(os), "path": path})})
        if not sought:
            raise EngineError(f"{self.project} {self.version} looks for no file for {layer}; is a special mode set?")
        return sought

    def run_linear(self, layer: Layer, m: int) -> None:
        """Run the launcher of a linear layer on M rows without memory."""
        import torch

        bn, bk = layer.block or (1, 1)
        with torch.device("meta"):
            a, b = (torch.empty(rows, layer.k, dtype=self.device.fp8) for rows in (m, layer.n))
            scales = [torch.empty(rows, -(-layer.k // bk)) for rows in (m, -(-layer.n // bn))]
            getattr(self.fp8, self._parts.launcher)(a, b, *scales, [bn, bk], torch.bfloat16)


def noting(seen: list[Path], function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose first argument is a path, with that path noted."""

    def noted(path: Any, *args: Any, **named: Any) -> Any:
        seen.append(Path(path))
        return function(path, *args, **named)

    return noted


class _Recorded:
    """Stands for a kernel, and notes its launches."""

    def __init__(self, kernel: Any, seen: list[Launch]) -> None:
        self.kernel, self.seen = kernel, seen

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **named: self.seen.append(Launch(self.kernel, grid, args, named))


@contextmanager
def replaced(module: ModuleType, names: Names) -> Iterator[None]:
    """Give a module other names for a while; also names that it has from the builtins."""
    before = {name: getattr(module, name, getattr(builtins, name, None)) for name in names}
    vars(module).update(names)
    try:
        yield
    finally:
        vars(module).update(before)


def load(root: Path, device: Device, more: Sequence[str] = ()) -> Engine:
    """Load the engine at `root` as it is on a device, with `more` of its modules. Raises EngineError."""
    project, package, version = locate(root)
    try:
        import torch

        supplied = _of_vllm(device) if project == "vllm" else _of_sglang(device)
    except ImportError as e:
        raise EngineError(f"to load {package}, torch and triton have to be installed here ({e}): {INSTALL}") from e
    finder = Finder(package, project, (*PARTS[project].executed, *more), supplied)
    # functions beside the kernels are compiled for use in a server; dynamo alone takes seconds to import
    with replaced(torch, {"compile": Stub("torch.compile", {})}):
        execute(finder)
    if project == "sglang":
        # it asks torch for the shared memory of a block; CUDA C Programming Guide, table of compute capabilities
        small = 101376 if device.arch in (86, 89, 120, 121) else None
        vars(sys.modules[PARTS[project].moe_lookup])["_get_cuda_shared_memory_per_block_optin"] = lambda: small
    return Engine(finder, version, device)


def _of_vllm(device: Device) -> dict[str, Names]:
    import torch
    import triton
    import triton.language as tl

    hip, own = device.backend == "hip", device.capability
    platform = {
        "get_device_name": lambda device_id=0: device.name,
        "get_device_capability": lambda device_id=0: own,
        "is_device_capability": lambda capability: own == divmod(capability, 10),
        "has_device_capability": lambda capability: own >= divmod(capability, 10),
        "is_device_capability_family": lambda capability: own[0] == capability // 10,
        "is_rocm": lambda: hip,
        "is_cuda": lambda: not hip,
        "is_cuda_alike": lambda: True,
        "is_xpu": lambda: False,
        "is_cpu": lambda: False,
        "is_fp8_fnuz": lambda: device.fp8 == torch.float8_e4m3fnuz,
        "fp8_dtype": lambda: device.fp8,
    }
    levels = ("debug", "info", "warning", "error", "debug_once", "info_once", "warning_once")
    quiet = Stub("vllm.logger.logger", dict.fromkeys(levels, lambda *_, **__: None))
    supplied: dict[str, Names] = {
        "vllm.logger": {"init_logger": lambda name: quiet},
        "vllm.platforms": {"current_platform": Stub("vllm.platforms.current_platform", platform)},
        "vllm.platforms.rocm": {"on_gfx1250": lambda: device.arch == "gfx1250"},
        "vllm.triton_utils": {"tl": tl, "triton": triton, "HAS_TRITON": False},
        "vllm.utils.import_utils": {"get_triton_kernels_version": lambda: None},
        f"{_V}.quantization.utils.quant_utils": {
            "GroupShape": type("GroupShape", (), {"PER_TOKEN": (1, -1), "PER_TENSOR": (-1, -1)})
        },
    }
    # its use of `regex` is within `re`
    return supplied if find_spec("regex") else {**supplied, "regex": {"sub": re.sub}}


def _of_sglang(device: Device) -> dict[str, Names]:
    cuda, gfx1250 = device.backend == "cuda", device.arch == "gfx1250"
    sm90 = cuda and device.capability[0] == 9
    ordinary = SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=False))
    utils = {
        "get_device_name": lambda device_id=0: device.name,
        "is_cuda": lambda: cuda,
        "is_hip": lambda: not cuda,
        "is_cpu": lambda: False,
        "is_npu": lambda: False,
        "cpu_has_amx_support": lambda: False,
        "is_sm90_supported": lambda: sm90,
        "is_gfx1250_supported": lambda: gfx1250,
        # decides between two kernels that read the same config
        "get_device_core_count": lambda: 0,
        "log_info_on_rank0": lambda logger, text: None,
    }
    logging.getLogger("sglang").setLevel(logging.CRITICAL)
    return {
        "sglang.srt.utils": utils,
        "sglang.srt.runtime_context": {
            "get_exec": lambda: ordinary,
            "get_platform": lambda: SimpleNamespace(is_sm90=sm90),
        },
        "sglang.srt.batch_invariant_ops": {"is_batch_invariant_mode_enabled": lambda: False},
        "sglang.kernels.jit.utils": {"is_arch_support_pdl": lambda: cuda and device.capability[0] >= 9},
    }


def ask(env: Mapping[str, str], question: Callable[..., T], *args: Any) -> T:
    """The answer of `question(*args)` in a fresh process, so that nothing of an earlier load or look-up counts.

    The question runs code of the engine: `worker.foreign` says what holds there. `env`: variables of the engine; those
    of this process do not count. Raises ForeignCodeError, and EngineError if the question does.
    """
    return call(question, *args, env=env, limits=ENGINE_LIMITS, packages=True, raises=(EngineError,))


def locate(root: Path) -> tuple[str, Path, str]:
    """The project, its package folder and its version ("" if unknown) of a package folder, or of one that holds it: a
    checkout, site-packages, what `unpack` made. Raises EngineError."""
    places = [(project, f) for project in PARTS for f in (root, root / project, root / "python" / project)]
    found = [(project, folder.absolute()) for project, folder in places if (folder / FOLDERS[project][-1]).is_dir()]
    if not found:
        raise EngineError(f"{root} holds neither vLLM nor SGLang: name a checkout, site-packages or the package folder")
    if len(found) > 1:
        raise EngineError(f"{root} holds both: name one of {', '.join(str(folder) for _, folder in found)}")
    project, package = found[0]
    told = package / "_version.py"
    text = told.read_text() if told.is_file() else ""
    versions = re.findall(r"^(?:__version__ = )?version = ['\"]([^'\"]+)", text, re.MULTILINE)
    return project, package, "".join(versions[:1])


def unpack(wheel: Path, folder: Path) -> Path:
    """Write the Python files and configs of a wheel below `folder`; returns `folder`. Raises EngineError."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if n.endswith(".py") or ("/configs/" in n and n.endswith(".json"))]
            archive.extractall(folder, names)
    except (OSError, zipfile.BadZipFile) as e:
        raise EngineError(f"{wheel} cannot be read as a wheel: {e}") from e
    return folder


_NAME = "from vllm.platforms import current_platform as p; print('name:', p.get_device_name(0), sep='')"


def device_here(root: Path) -> tuple[Device, str]:
    """The first GPU of this process, and who told its name: `vllm.platforms` if vLLM runs here from `root`, else
    `torch`.

    Config files carry this name. NVIDIA's driver tells vLLM and torch the same one. For AMD's GPUs vLLM has names of
    its own: a server would not find files with torch's. Raises EngineError then, and without a GPU.
    """
    import torch

    if not torch.cuda.is_available():
        raise EngineError("torch sees no GPU here")
    properties: Any = torch.cuda.get_device_properties(0)
    hip = torch.version.hip is not None
    arch = properties.gcnArchName.split(":")[0] if hip else 10 * properties.major + properties.minor
    project, package, _ = locate(root)
    if project == "vllm":
        try:
            return Device(_ask_vllm_for_the_name(package), arch), "vllm.platforms"
        except EngineError:
            if hip:
                raise
    return Device(properties.name, arch), "torch"


def _ask_vllm_for_the_name(package: Path) -> str:
    """The GPU's name as the vLLM of this package folder says it. Raises EngineError."""
    command = [sys.executable, "-c", _NAME]
    try:
        done = subprocess.run(command, cwd=package.parent, capture_output=True, text=True, timeout=ASK_S, check=False)
    except subprocess.TimeoutExpired:
        reason = f"no answer within {ASK_S} s"
    else:
        name = re.search(r"^name:(.+)", done.stdout, re.MULTILINE)
        if name:
            return name[1]
        reason = clean("".join(done.stderr.splitlines()[-1:]), 300) or f"it ended with code {done.returncode}"
    raise EngineError(
        f"vLLM in {package} does not tell this GPU's name, which its config files carry ({reason}); use the Python that"
        f' vLLM is installed for. To try it: python -c "{_NAME}"'
    )


# --- modules of an engine, run from their unchanged files; whatever else these import is a recording stub ---


class Stub:
    """Stands for a module or name of the engine. `given`: attributes that are real; all others are stubs too.

    A stub may be imported, subclassed, used as an annotation and, while modules are loaded, called as a decorator.
    Using its value is an EngineError, so that no decision of the engine rests on something that was not there.
    """

    importing = False

    def __init__(self, name: str, given: Names) -> None:
        self._stub = name
        self.__dict__.update(given)

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__"):
            raise AttributeError(key)
        return self.__dict__.setdefault(key, Stub(f"{self._stub}.{key}", {}))

    def __call__(self, *args: Any, **named: Any) -> Any:
        if not Stub.importing:
            self._refuse()
        # a decorator without arguments, or with them
        return args[0] if len(args) == 1 and not named and callable(args[0]) else Stub(f"{self._stub}()", {})

    def _refuse(self, *_: Any) -> NoReturn:
        raise EngineError(f"{self._stub} decides something here, but it is not loaded: this version needs more files")

    __bool__ = __len__ = __iter__ = __eq__ = __ne__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = _refuse
    __hash__ = object.__hash__

    def __or__(self, _: Any) -> Any:
        return self

    __ror__ = __getitem__ = __or__


class Finder(MetaPathFinder, Loader):
    """Imports everything below one package. `executed`: modules whose files are run. Other modules are stubs;
    `supplied`: names of these that are ours."""

    def __init__(self, package: Path, project: str, executed: Sequence[str], supplied: Mapping[str, Names]) -> None:
        self.package, self.project, self.executed, self.supplied = package, project, executed, supplied

    def file(self, module: str) -> Path:
        """The file of a module, whether or not there is one."""
        stem = self.package.joinpath(*module.split(".")[1:])
        return stem / "__init__.py" if stem.is_dir() else stem.with_suffix(".py")

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] != self.project and name not in self.supplied:
            return None
        return ModuleSpec(name, self, is_package=name not in self.executed or self.file(name).name == "__init__.py")

    def create_module(self, spec: ModuleSpec) -> Any:
        """None lets the import machinery make an ordinary module."""
        return None if spec.name in self.executed else Stub(spec.name, self.supplied.get(spec.name, {}))

    def exec_module(self, module: ModuleType) -> None:
        if isinstance(module, ModuleType):
            file = self.file(module.__name__)
            module.__file__ = str(file)
            exec(_code(file, file.stat().st_mtime_ns), vars(module))


@functools.cache
def _code(file: Path, _stamp: int) -> CodeType:
    return compile(file.read_bytes(), str(file), "exec", dont_inherit=True)


def execute(finder: Finder) -> None:
    """Import the finder's modules into this process, in place of what an earlier finder imported of the package."""
    sys.meta_path[:] = [finder, *(f for f in sys.meta_path if not isinstance(f, Finder))]
    for name in [m for m in sys.modules if m.partition(".")[0] == finder.project]:
        del sys.modules[name]
    Stub.importing = True
    module = ""
    try:
        for module in finder.executed:
            importlib.import_module(module)
    except Exception as e:
        raise EngineError(
            f"{finder.package} is not a {finder.project} of a version that is known: {module} cannot be loaded: "
            f"{type(e).__name__}: {e}"
        ) from e
    finally:
        Stub.importing = False
