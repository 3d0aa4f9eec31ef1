"""Launch of a candidate: its plan (plain data), compilation for a target, binding to tensors."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from worker.families.triton_config import KernelConfig
from worker.tuners.common.problem import Problem
from worker.tuners.search.processes import STATUS
from worker.tuners.search.target import Target
from worker.tuners.triton.model import accumulators, halves, occupancy, stores

if TYPE_CHECKING:  # compile processes need no torch
    from worker.tuners.triton.operands import Operands

COUNTERS = 1 << 16
"""Tiles that split-K can count. Their counters are the front of every workspace, so that candidates can share one."""
ALIGN = 16
"""Bytes that tensors are aligned to, and the divisor that the compiler may assume."""

_TYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "int8": "i8",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e4m3fnuz": "fp8e4b8",
    "float4_e2m1fn_x2": "u8",
}
_MEMORY = ("out of resource", "shared memory", "too many resources", "ran out of registers", "exceeds available")
_LACKING = ("not supported", "unsupported", "not implemented", "no native support", "doesn't support")


class CompileError(Exception):
    """A candidate that does not compile. `kind` is `resource` (the device has too little), `unsupported` or `error`."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """All that compiling and launching need, but the tensors. Plain data: can be pickled, compared and hashed by key.

    `aligned` names the arguments that are multiples of ALIGN, `scalars` the run-time integers, `blocks` the block
    shapes of the arguments that are tensor descriptors. `workspace_bytes` is 0 where no workspace is needed.
    """

    kernel: str
    signature: dict[str, str]
    constexprs: dict[str, Any]
    aligned: tuple[str, ...]
    options: dict[str, int | bool]
    scalars: dict[str, int]
    blocks: dict[str, tuple[int, int]]
    grid: tuple[int, int, int]
    workspace_bytes: int

    @property
    def compile_key(self) -> str:
        """Plans of one key are one compiled kernel: neither M nor split_k nor group_m is in it."""
        text = repr((self.kernel, self.signature, self.constexprs, self.aligned, sorted(self.options.items())))
        return hashlib.sha256(text.encode()).hexdigest()


def plan(p: Problem, c: KernelConfig, target: Target) -> LaunchPlan:
    """The launch of a legal candidate (space.why_illegal). No tensor, no device and no compiler is touched."""
    element, out = _TYPES[p.dtype], _TYPES[p.outdtype]
    pointers: dict[str, str | None] = {
        "x": f"*{element}",
        "w": f"*{element}",
        "out": f"*{out}",
        "bias": f"*{element}" if p.bias else None,
        "xs": _scales(p),
        "ws": _scales(p),
    }
    blocks: dict[str, tuple[int, int]] = {}
    if c.descriptor:
        blocks = {"x": (c.block_m, c.block_k), "w": (c.block_n, c.block_k)}
        if c.side:
            blocks["w_side"] = (c.side, c.block_k)
        if stores(p, c):
            blocks["out"] = (c.block_m, c.block_n // 2 if halves(p, c) else c.block_n)
            if c.side:
                blocks["out_side"] = (c.block_m, c.side)
        kinds = {"out": out, "out_side": out}
        pointers |= {name: f"tensordesc<{kinds.get(name, element)}[{r}, {k}]>" for name, (r, k) in blocks.items()}
    scalars = {"M": p.m, "N": p.n, "K": p.k}
    switches: dict[str, Any] = {"BM": c.block_m, "BN": c.block_n, "BK": c.block_k, "EVEN_K": p.k % c.block_k == 0}
    tiles = -(-p.m // c.block_m) * -(-p.n // c.width)
    split = c.split_k > 1
    at_once = max(1, min(8, 64 // accumulators(c, target)))
    if p.scale == "mx":
        kernel = "mx"
        del pointers["bias"]
    elif c.persistent:
        kernel = "persistent"
        scalars["B"] = p.b
        switches |= {"HALVES": halves(p, c), "DESC": c.descriptor, "STORE": stores(p, c)}
    else:
        kernel = "tiled"
        switches |= {"SWAP": c.swap, "DESC": c.descriptor, "STORE": stores(p, c), "SIDE": c.side}
        pointers = {"w_side": None, "out_side": f"*{out}" if c.side else None} | pointers
    scalars["group_m"] = c.group_m
    if kernel == "persistent":
        grid = (min(tiles * p.b, target.sms * min(2, occupancy(p, c, target))), 1, 1)
    else:
        pointers |= {"partial": "*fp32" if split else None, "count": "*i32" if split else None}
        scalars["splits"] = c.split_k
        switches |= {"SPLIT": split, "AT_ONCE": at_once if split else 1, "XCDS": target.xcds}
        grid = (tiles, c.split_k, p.b)
    if kernel != "mx":
        switches |= {"SCALE": p.scale, "BIAS": p.bias, "INT": p.dtype == "int8"}
    size = 4 * COUNTERS + 4 * tiles * p.b * c.split_k * c.block_m * c.width if split else 0
    signature = {name: kind or "constexpr" for name, kind in pointers.items()}
    signature |= dict.fromkeys(scalars, "i32") | dict.fromkeys(switches, "constexpr")
    constexprs = {name: None for name, kind in pointers.items() if kind is None} | switches
    aligned = [name for name, kind in pointers.items() if kind and kind.startswith("*")]
    aligned += [name for name in ("N", "K") if scalars[name] % ALIGN == 0]
    return LaunchPlan(kernel, signature, constexprs, tuple(aligned), _options(c, target), scalars, blocks, grid, size)


def _scales(p: Problem) -> str | None:
    if p.scale == "none":
        return None
    return "*u8" if p.scale == "mx" else "*fp32"


def _options(c: KernelConfig, target: Target) -> dict[str, int | bool]:
    options: dict[str, int | bool] = {"num_warps": c.num_warps, "num_stages": c.num_stages, "enable_fp_fusion": True}
    if target.backend == "hip":
        options |= {"waves_per_eu": c.waves_per_eu, "matrix_instr_nonkdim": c.matrix_instr_nonkdim}
        if target.arch == "gfx942":
            options["kpack"] = c.kpack
    return options


def compile_plan(made: LaunchPlan, target: Target) -> Any:
    """The compiled kernel, from Triton's disk cache where it is there (TRITON_CACHE_DIR). Needs no device.

    With TRITON_INTERPRET=1 it is the interpreted function. Raises CompileError.
    """
    import triton
    from triton.compiler import ASTSource

    function = kernel_of(made.kernel)
    if not hasattr(function, "cache_key"):
        return function
    order = {name: made.signature[name] for name in function.arg_names}
    attrs = {(i,): [["tt.divisibility", ALIGN]] for i, name in enumerate(order) if name in made.aligned}
    source = ASTSource(function, order, made.constexprs, attrs)
    try:
        compiled = triton.compile(source, gpu_target(target), made.options)
    except Exception as e:
        while e.__cause__ is not None and isinstance(e.__cause__, Exception):
            e = e.__cause__  # Triton quotes the source, line by line up to the kernel; the reason is at the bottom
        raise CompileError(kind_of(e), f"{type(e).__name__}: {e}") from e
    if compiled.metadata.shared > target.shared_bytes:
        raise CompileError(
            "resource", f"needs {compiled.metadata.shared} bytes of shared memory, {target.shared_bytes} are there"
        )
    return compiled


def gpu_target(target: Target) -> Any:
    """Triton's GPUTarget of a target."""
    from triton.backends.compiler import GPUTarget

    return GPUTarget(target.backend, target.arch, target.warp_size)


def kernel_of(name: str) -> Any:
    """The jitted kernel of a name. Imports triton. Raises KeyError for a name that is none."""
    from worker.tuners.triton.kernels import KERNELS

    return KERNELS[name]


def kind_of(e: Exception) -> str:
    """Kind of a CompileError by what the compiler raised."""
    text = f"{type(e).__name__} {e}".lower()
    if type(e).__name__ == "OutOfResources" or any(word in text for word in _MEMORY):
        return "resource"
    if isinstance(e, NotImplementedError) or any(word in text for word in _LACKING):
        return "unsupported"
    return "error"


def bind(made: LaunchPlan, compiled: Any, operands: Operands, out: Any, workspace: Any = None) -> Callable[[], None]:
    """One call of the kernel on these tensors, with all that a call needs; fit for a CUDA or HIP graph.

    `workspace` is a uint8 tensor of at least `workspace_bytes`, zero when it was made; every call leaves its counters
    at zero, so calls on one stream can share it, other candidates' too. Raises CompileError where the device has too
    little for the kernel, ValueError for tensors that are not aligned or a workspace that is too small.
    """
    import torch

    tensors: dict[str, Any] = {
        "x": operands.x,
        "w": operands.w,
        "w_side": operands.w,
        "out": out,
        "out_side": out,
        "bias": operands.bias,
        "xs": operands.x_scale,
        "ws": operands.w_scale,
    }
    if made.workspace_bytes:
        if workspace is None or workspace.numel() < made.workspace_bytes:
            raise ValueError(f"the workspace must have {made.workspace_bytes} bytes")
        tensors["count"] = workspace[: 4 * COUNTERS].view(torch.int32)
        tensors["partial"] = workspace[4 * COUNTERS : made.workspace_bytes].view(torch.float32)
    for name, tensor in tensors.items():
        if tensor is not None and (tensor.data_ptr() % ALIGN or not tensor.is_contiguous()):
            raise ValueError(f"{name} is not contiguous and aligned to {ALIGN} bytes")
    tensors |= {name: _descriptor(tensors[name], block) for name, block in made.blocks.items()}
    values = tensors | made.scalars | made.constexprs
    function = kernel_of(made.kernel)
    if not hasattr(compiled, "metadata"):
        values |= {name: _descriptor(t, made.blocks.get(name)) for name, t in _interpreted(operands).items()}
        given = {name: values[name] for name in function.arg_names}
        return lambda: compiled[made.grid](**given)
    arguments = [values[name] for name in function.arg_names]
    try:
        launch = compiled[made.grid]
    except Exception as e:
        raise CompileError(kind_of(e), f"{type(e).__name__}: {e}") from e
    return lambda: launch(*arguments)


def _interpreted(operands: Operands) -> dict[str, Any]:
    """X and W for Triton's interpreter, whose `tl.dot` takes bfloat16 for integers (seen in 3.9): as float32."""
    both = {"x": operands.x, "w": operands.w, "w_side": operands.w}
    return {name: t.float() if operands.problem.dtype == "bfloat16" else t for name, t in both.items()}


def _descriptor(tensor: Any, block: tuple[int, int] | None) -> Any:
    """A descriptor of a tensor as rows of its last dimension; batches follow each other. Without a block: itself."""
    if block is None:
        return tensor
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(tensor.view(-1, tensor.shape[-1]), list(block))


def compile_job(job: tuple[LaunchPlan, Target]) -> tuple[str, str]:
    """Compile for the target; the result is in Triton's disk cache. (status, detail)."""
    made, target = job
    try:
        compiled = compile_plan(made, target)
    except CompileError as e:
        return STATUS.get(e.kind, "error"), str(e)
    except MemoryError:
        return "oom", "the compiler ran out of memory"
    with contextlib.suppress(Exception):  # it only saves time: loading the kernel makes a missing one
        _make_launcher(compiled, target)
    return "ok", ""


def _make_launcher(compiled: Any, target: Target) -> None:
    """Up to 3.6 Triton has a C compiler make a launcher for each signature (0.1 s): here, not where the GPU waits.

    Later versions have one for all. It is linked against the driver's library, and opens no device.
    """
    vendor, name = ("nvidia", "CudaLauncher") if target.backend == "cuda" else ("amd", "HIPLauncher")
    driver = importlib.import_module(f"triton.backends.{vendor}.driver")
    if hasattr(driver, "make_launcher") and hasattr(compiled, "metadata"):
        getattr(driver, name)(compiled.src, compiled.metadata)
