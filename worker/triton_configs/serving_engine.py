"""vLLM and SGLang: the config files that they read, and the kernels that these are for, asked of the engine's own code.

`load_engine` runs the unchanged files of look-ups, launchers and kernels in this process (`engine_modules.py`), and
gives a `ServingEngine` to ask. `ask_engine` does that in a process of its own. Read from vLLM 0.33.0 and SGLang 0.5.23.
Importing this module imports neither torch nor triton.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

from worker.foreign.runner import Limits, call
from worker.triton_configs.engine_modules import (
    EngineImporter,
    Stub,
    execute_modules,
    replaced,
    supplied_to_sglang,
    supplied_to_vllm,
)
from worker.triton_configs.engine_package import (
    INSTALL,
    PROJECTS,
    EngineDevice,
    EnginePackage,
    Layer,
    ServingEngineError,
    locate_engine,
)
from worker.triton_configs.pair import Values, join_pair

T = TypeVar("T")
LINEAR_LOOKUP = "get_w8a8_block_fp8_configs"
MOE_LOOKUP = "get_moe_configs"
"""The look-ups of both engines for linear layers and for experts."""
ENGINE_LIMITS = Limits(seconds=900, memory=16 << 30)
"""Limits of a process that answers one question about an engine. It imports torch and triton, which allocate much
memory, on a machine that may be busy."""
SMALL_SHARED_BYTES = 101376
"""Shared memory of a block on capabilities 8.6, 8.9, 12.0, 12.1 (CUDA C Programming Guide, table of capabilities)."""


class KernelLaunch(NamedTuple):
    """One launch that an engine asked for: `kernel[grid](*args, **named)`."""

    kernel: Any
    grid: Any
    args: tuple[Any, ...]
    named: Values


class ServingEngine:
    """A loaded engine; `load_engine` makes it. A process holds one, and the latest counts."""

    def __init__(self, package: EnginePackage, device: EngineDevice) -> None:
        self.project, self.package, self.version = package
        self.device = device
        self._names = PROJECTS[self.project]
        self.fp8: Any = sys.modules[self._names.fp8]
        self.moe: Any = sys.modules[self._names.moe]
        self.moe_lookup: Any = sys.modules[self._names.moe_lookup]

    @property
    def has_down_files(self) -> bool:
        """True if the second product of experts may have a file of its own."""
        return self.project == "sglang"

    def paths(self, layer: Layer) -> list[Path]:
        """The paths at which the engine looks for the layer's file, in its order: all of them, as none is there for
        this look-up. Raises ServingEngineError."""
        tried: list[Path] = []
        path_module = SimpleNamespace(**{**vars(os.path), "exists": recording_paths(tried, lambda path: False)})
        self._look_up(layer, os=SimpleNamespace(**{**vars(os), "path": path_module}))
        if not tried:
            raise ServingEngineError(
                f"{self.project} {self.version} looks for no file for {layer}; is a special mode set?"
            )
        return tried

    def file_name(self, layer: Layer) -> str:
        """The name of the layer's config file."""
        return self.paths(layer)[0].name

    def folders(self, layer: Layer) -> list[Path]:
        """The folders in which the engine looks for the file, in its order."""
        return [path.parent for path in self.paths(layer)]

    def table(self, layer: Layer) -> dict[int, Values] | None:
        """The entries that the engine reads for a layer, in its order; None without a file."""
        table, _ = self._look_up(layer)
        return table

    def file_read(self, layer: Layer) -> Path | None:
        """The file that `table` reads."""
        _, opened = self._look_up(layer)
        return opened[-1] if opened else None

    def down_file_read(self, layer: Layer) -> Path | None:
        """The file that the second product of experts has for itself."""
        if not (self.has_down_files and layer.e):
            return None
        path = self.file_read(layer.second_product)
        return path if path and path.name == self.file_name(layer.second_product) else None

    def config(self, layer: Layer, m: int) -> Values:
        """The config of a launch with M rows (tokens): an entry, or else the engine's default; of SGLang's experts that
        of both products (`pair.py`)."""
        self._look_up(layer)  # raises if the engine's look-up fails
        if layer.op == "linear":
            launch = self.launches("linear", lambda: self.run_linear(layer, m))[0]
            return {key: value for key, value in launch.named.items() if key != "needs_masking"}
        w1 = (layer.e, 2 * layer.n, layer.k)
        w2 = (layer.e, layer.k, layer.n)
        block = list(layer.block) if layer.block else None
        pick = partial(self.moe_lookup.try_get_optimal_moe_config, w1, w2, layer.topk, layer.dtype or None, m)
        if not self.has_down_files:
            return dict(pick(block_shape=block))
        up, (down, _) = pick(block_shape=block, return_down_config=True)
        return join_pair(up, down)

    def launches(self, op: str, call: Callable[[], Any]) -> list[KernelLaunch]:
        """The launches that `call` makes through launchers of `fp8` or `moe`. They are noted, not made."""
        from triton.runtime.jit import KernelInterface

        module = self._module_of(op)
        seen: list[KernelLaunch] = []
        kernels = {name: _Recorded(k, seen) for name, k in vars(module).items() if isinstance(k, KernelInterface)}
        with replaced(module, kernels):
            call()
        if not seen:
            raise ServingEngineError(
                f"{self.project} {self.version} launches no Triton kernel for this on {self.device.name}"
            )
        return seen

    def kernel(self, op: str) -> Any:
        """The Triton function that the op's config files are for."""
        name = self._names.linear_kernel if op == "linear" else "fused_moe_kernel"
        return getattr(self._module_of(op), name)

    def source_hash(self, op: str) -> str:
        """A hash of the file with kernel and launcher."""
        return hashlib.sha256(Path(self._module_of(op).__file__).read_bytes()).hexdigest()[:16]

    def run_linear(self, layer: Layer, m: int) -> None:
        """Run the launcher of a linear layer on M rows without memory."""
        import torch

        block_n, block_k = layer.block or (1, 1)
        launcher = getattr(self.fp8, self._names.linear_launcher)
        with torch.device("meta"):
            a, b = (torch.empty(rows, layer.k, dtype=self.device.fp8) for rows in (m, layer.n))
            scales = [torch.empty(rows, -(-layer.k // block_k)) for rows in (m, -(-layer.n // block_n))]
            launcher(a, b, *scales, [block_n, block_k], torch.bfloat16)

    def _module_of(self, op: str) -> Any:
        return self.fp8 if op == "linear" else self.moe

    def _look_up(self, layer: Layer, **replacements: Any) -> tuple[dict[int, Values] | None, list[Path]]:
        """The engine's look-up as a fresh process does it: the entries, None without a file, and the files that it
        opens. `replacements` are names of its module meanwhile. Raises ServingEngineError, which names the file that
        cannot be read."""
        module = self.moe_lookup if layer.e else self.fp8
        call = self._lookup_call(layer)
        lookup: Any = call.func
        lookup.cache_clear()
        opened: list[Path] = []
        with replaced(module, {"open": recording_paths(opened, open), **replacements}):
            try:
                table: dict[int, Values] | None = call()
            except Exception as e:  # whatever the engine's own code raises
                task = f"cannot read {opened[-1]}" if opened else f"fails for {layer}"
                raise ServingEngineError(f"{self.project} {self.version} {task}: {type(e).__name__}: {e}") from e
        lookup.cache_clear()
        for key, values in (table or {}).items():
            if not isinstance(values, dict):
                raise ServingEngineError(f"{opened[-1]}: the entry of {key} is not a config, but {values!r:.80}")
        return table, opened

    def _lookup_call(self, layer: Layer) -> partial[Any]:
        """The call of the engine's look-up for a layer. Raises ServingEngineError."""
        block_n, block_k = layer.block or (0, 0)
        if layer.e:
            lookup = getattr(self.moe_lookup, MOE_LOOKUP)
            is_second = {"down_moe": True} if layer.op == "moe_down" else {}  # a parameter of SGLang's alone
            return partial(lookup, layer.e, layer.n, layer.dtype or None, block_n, block_k, **is_second)
        if layer.dtype != "fp8_w8a8" or not layer.block:
            raise ServingEngineError(
                f"of linear layers only fp8_w8a8 with a block shape has config files here, not {layer}"
            )
        return partial(getattr(self.fp8, LINEAR_LOOKUP), layer.n, layer.k, block_n, block_k)


@contextmanager
def taking_quantized(moe: Any, scales: Callable[[Any], Any]) -> Iterator[None]:
    """Let a launcher of experts take activations as they are, which come quantized. `scales`: gives theirs."""

    def quantize(activations: Any, *_: Any, **__: Any) -> Any:
        return activations, scales(activations)

    quantizers = [name for name in vars(moe) if re.search("_quant_(fp|int)8$|_fp8_quant$", name)]
    with replaced(moe, dict.fromkeys(quantizers, quantize)):
        yield


def recording_paths(seen: list[Path], function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose first argument is a path, with that path added to `seen`."""

    def recorded(path: Any, *args: Any, **named: Any) -> Any:
        seen.append(Path(path))
        return function(path, *args, **named)

    return recorded


class _Recorded:
    """Stands for a kernel, and notes its launches."""

    def __init__(self, kernel: Any, seen: list[KernelLaunch]) -> None:
        self.kernel = kernel
        self.seen = seen

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **named: self.seen.append(KernelLaunch(self.kernel, grid, args, named))


def load_engine(root: Path, device: EngineDevice, more: Sequence[str] = ()) -> ServingEngine:
    """Load the engine at `root` as it is on a device, with `more` of its modules. Raises ServingEngineError."""
    package = locate_engine(root)
    is_vllm = package.project == "vllm"
    try:
        import torch

        supplied = supplied_to_vllm(device) if is_vllm else supplied_to_sglang(device)
    except ImportError as e:
        needs = f"to load {package.folder}, torch and triton have to be installed here"
        raise ServingEngineError(f"{needs} ({e}): {INSTALL}") from e
    names = PROJECTS[package.project]
    importer = EngineImporter(package.folder, package.project, (*names.executed, *more), supplied)
    # functions beside the kernels are compiled for use in a server; dynamo alone takes seconds to import
    with replaced(torch, {"compile": Stub("torch.compile", {})}):
        execute_modules(importer)
    for module, lookup in ((names.fp8, LINEAR_LOOKUP), (names.moe_lookup, MOE_LOOKUP)):
        if not hasattr(sys.modules[module], lookup):
            fault = f"{package.folder} is not a {package.project} of a version that is known"
            raise ServingEngineError(f"{fault}: {module} has no {lookup}")
    if not is_vllm:
        # SGLang asks torch for the shared memory of a block
        shared_bytes = SMALL_SHARED_BYTES if device.arch in (86, 89, 120, 121) else None
        lookup_names = vars(sys.modules[names.moe_lookup])
        lookup_names["_get_cuda_shared_memory_per_block_optin"] = lambda: shared_bytes
        lookup_names["logger"].warning_once = lambda *_: None  # a server adds this method
        if device.triton:
            lookup_names["triton"] = SimpleNamespace(__version__=device.triton)
    return ServingEngine(package, device)


def ask_engine(env: Mapping[str, str], question: Callable[..., T], *args: Any) -> T:
    """The answer of `question(*args)` in a fresh process, so that nothing of an earlier load or look-up counts.

    The question runs code of the engine: `worker.foreign` says what holds there. `env`: variables of the engine; those
    of this process do not count. Raises ForeignCodeError, and ServingEngineError if the question does.
    """
    return call(question, *args, env=env, limits=ENGINE_LIMITS, packages=True, raises=(ServingEngineError,))
