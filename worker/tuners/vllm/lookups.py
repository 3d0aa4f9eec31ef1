"""Every look-up of an engine's config files, and its launchers, asked without a GPU: what reads a file, and what Triton
makes of each entry.

A look-up is a function beside a `configs` folder that opens files with a device in their names. It is asked with every
argument that it can have for the sizes of a file's name: the file is read only if one of them asks for that very name.
Launchers run on operands without memory, and end where Triton would compile, or with the compiled kernel. vLLM and
SGLang. Imports torch and triton.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import cache, lru_cache
from itertools import groupby, product
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import triton
import triton.language as tl

from worker.text import clean, plural
from worker.triton_configs.engine import FOLDERS, PARTS, Device, Layer, Values, load, noting, replaced
from worker.triton_configs.resolve import LDS_BYTES
from worker.tuners.search.compiling import CompilePool, compile_for, compiling, facts_of
from worker.tuners.search.source import CompileFacts, KernelSource, Target, known

CACHE = Path("~/.cache/gemmfleet/engine-compiles.jsonl")
# Archs of devices by a word of their names; files of other devices are only looked up.
_CHIPS: tuple[tuple[str, int | str], ...] = (
    ("A[18]00", 80), ("L20|L40S?|RTX_4090|RTX_(6000|5880)_Ada", 89), ("H[128]00|H20", 90), ("G?B200", 100),
    ("G?B300", 103), ("RTX_PRO_6000", 120), ("GB10", 121), (r"MI3(00|08|25)\w?", "gfx942"), (r"MI35[05]\w?", "gfx950"),
    ("R9700", "gfx1201"), ("8060S", "gfx1151"),
)  # fmt: skip
# Shared memory of a program on NVIDIA's: CUDA C Programming Guide, table of compute capabilities.
_SHARED_BYTES = {80: 166912, 89: 101376, 90: 232448, 100: 232448, 103: 232448, 120: 101376, 121: 101376}
HIDDEN, TOPK, GROUP = 4096, 8, 128
"""No name says these: hidden size and experts of a token of a MoE layer, values of a scale of 4-bit weights."""
_NAME = re.compile(
    r"(?:E=(\d+),N=(\d+)|N=(\d+),K=(\d+)),device_name=([^,]*?)(?:,dtype=(\w+?))?(?:,block_shape=\[(\d+), ?(\d+)\])?"
    r"((?:,\w+=\w+?)*(?:_down)?)\.json"
)
_DTYPE = "get_config_dtype_str"


class File(NamedTuple):
    """A config file by its name: the layer, the device, and what follows them (`_down`)."""

    path: Path
    layer: Layer
    device: str
    rest: str

    @classmethod
    def of(cls, path: Path) -> File | None:
        """None for a file that is not named as config files are."""
        found = _NAME.fullmatch(path.name)
        if found is None:
            return None
        e, moe_n, n, k, device, dtype, bn, bk, rest = found.groups("")
        groups = (0, GROUP) if dtype == "int4_w4a16" else None
        block = (int(bn), int(bk)) if bn else groups
        layer = Layer("moe" if e else "linear", int(moe_n or n), int(k or HIDDEN), int(e or 0), TOPK, dtype, block)
        return cls(path, layer, device, rest)

    @property
    def arch(self) -> int | str | None:
        """The arch of its device, None if it is not known."""
        return next((arch for word, arch in _CHIPS if re.search(rf"(?:^|_)(?:{word})(?=[-_]|$)", self.device)), None)


class Answer(NamedTuple):
    """An engine's way to a file. `read`: the first file of that name that it opens; `error`: why the look-up fails.
    `by`: the look-up. If no look-up asks for the name, `strange` is what none of them forms."""

    read: Path | None = None
    table: Mapping[int, Values | None] = {}
    error: str = ""
    by: Any = None
    strange: str = ""


class Entry(NamedTuple):
    """An entry that its kernel accepts. Entries of one `key` compile to the same code."""

    key: str
    file: File
    m: int
    values: Values


class Lookups:
    """All look-ups of an engine on a file's device, and its launchers, in this process."""

    def __init__(self, package: Path, name: str, arch: int | str | None) -> None:
        """Raises EngineError."""
        sources = _sources(package)
        readers = [module for module, text in sources.items() if "device_name=" in text]
        if arch is not None:
            compile_for(target_of(arch))
        further = [module for module in readers if module not in PARTS[package.name].executed]
        self.engine = load(package, Device(name.replace("_", " "), arch or 90), further)
        self._dtypes = _dtypes(sources.values())
        found = [f for module in readers for f in _functions(module)]
        self._lookups = [f for f in found if "configs" in f.__code__.co_consts]
        self._default = next(f for f in found if f.__name__ == "get_default_config")

    def ask(self, file: File) -> Answer:
        """Ask all look-ups for the file."""
        own = _parts(file.path)
        strange = own
        for lookup in self._lookups:
            for arguments in self._arguments(lookup, file.layer):
                sought: list[Path] = []
                table, error = None, ""
                with replaced(os.path, {"exists": noting(sought, os.path.exists)}):
                    try:
                        table = lookup(**arguments)
                    except Exception as e:  # noqa: BLE001 - the engine's own errors are of any type
                        error = f"{type(e).__name__}: {e}"
                if same := [path for path in sought if path.name == file.path.name]:
                    read = next((path for path in same if path.exists()), None)
                    return Answer(read, table or {}, error, lookup)
                others = ([part for part in own if part not in _parts(path)] for path in sought)
                strange = min([strange, *filter(None, others)], key=len)
        return Answer(strange=", ".join(strange))

    def _arguments(self, lookup: Callable[..., Any], layer: Layer) -> Iterator[Values]:
        """All arguments for a layer's sizes, those of its own first; none if the look-up is for other layers."""
        parameters = inspect.signature(lookup).parameters
        flags = [name for name, p in parameters.items() if isinstance(p.default, bool)]
        dtypes = sorted(self._dtypes, key=lambda dtype: (dtype or "") != layer.dtype)
        sizes = {"E": layer.e, "num_experts": layer.e} if layer.e else {"K": layer.k}
        for block, dtype, *on in product(dict.fromkeys((layer.block, None)), dtypes, *([[False, True]] * len(flags))):
            bn, bk = block or (0, 0)
            given = {**sizes, "N": layer.n, "inter_dim": layer.n, "dtype": dtype, "block_n": bn, "block_k": bk}
            given |= dict(zip(flags, on, strict=True))
            if parameters.keys() <= given.keys():
                yield {name: given[name] for name in parameters}

    def bind(self, file: File, answer: Answer, m: int, values: Values | None) -> tuple[Values, str]:
        """(constants, key) of the kernel that the engine would launch for M rows with these values, or its default.

        The key differs wherever the code may; it is empty if the engine launches no Triton kernel of these files.
        Raises what the engine or Triton raises.
        """
        seen: list[Values] = []

        def stop(*, fn: Any, compile: Values, **_: Any) -> bool:
            seen.append({**json.loads(compile["specialization_data"]), "key": fn.jit_function.cache_key})
            return True  # nothing is compiled then

        triton.knobs.runtime.jit_cache_hook = stop
        try:
            self.launch(file, answer, m, values)
        finally:
            triton.knobs.runtime.jit_cache_hook = None
        if not seen:
            return {}, ""
        names = list(seen[0]["signature"])
        constants = zip(seen[0]["constant_keys"], seen[0]["constant_vals"], strict=True)
        key = hashlib.sha256(json.dumps([triton.__version__, seen], sort_keys=True).encode()).hexdigest()
        return {names[path[0]]: value for path, value in constants}, key

    def launch(self, file: File, answer: Answer, m: int, values: Values | None) -> None:
        """Run the engine's launcher on operands without memory."""
        layer, module = file.layer, answer.by.__module__
        bn, bk = layer.block or (0, 0)
        if module == self._default.__module__:
            given: Values = {"M": m, "E": layer.e, "N": layer.n, "K": layer.k, "topk": TOPK, "is_marlin": False}
            given |= {"dtype": layer.dtype or None, "block_shape": [bn, bk] if layer.block else None}
            self._launch_moe(file, m, values or _by_name(self._default, given))
            return
        for launcher in _functions(module):
            names = launcher.__code__.co_names, launcher.__code__.co_varnames
            if layer.block and not layer.e and answer.by.__name__ in names[0] and "block_size" in names[1]:
                operands = [self._of(layer.dtype, rows, layer.k) for rows in (m, layer.n)]
                operands += [self._of("float32", rows, -(-layer.k // bk)) for rows in (m, -(-layer.n // bn))]
                with replaced(sys.modules[module], {answer.by.__name__: lambda *_: {m: values} if values else None}):
                    launcher(*operands, [bn, bk], torch.bfloat16)

    def _launch_moe(self, file: File, m: int, values: Values) -> None:
        """Launch a layer's first GEMM; its second for a file of that one."""
        layer, dtype, of, down = file.layer, file.layer.dtype, self._of, file.rest.endswith("_down")
        n, k = (layer.k, layer.n) if down else (2 * layer.n, layer.k)
        bn, bk = layer.block or (0, k)
        a_scale = of("float32", m, -(-k // bk)) if dtype.endswith("a8") else None
        b_scale = of("float32", layer.e, -(-n // max(bn, 1)), -(-k // bk)) if "_w" in dtype else None
        if dtype == "fp8_w8a8" and not layer.block and "per_channel" not in file.rest:
            a_scale, b_scale = of("float32", 1), of("float32", layer.e)
        given: dict[str, Any] = {
            "A": of("" if dtype.endswith("a16") else dtype, m, k), "A_scale": a_scale, "B_scale": b_scale, "B_zp": None,
            "B": of(dtype, layer.e, n, k // 2 if dtype == "int4_w4a16" else k), "C": of("", m, TOPK, n), "B_bias": None,
            "topk_weights": of("float32", m, TOPK), "topk_ids": of("int32", m, TOPK), "bias": None,
            "sorted_token_ids": of("int32", m * TOPK), "expert_ids": of("int32", m * TOPK), "mul_routed_weight": down,
            "top_k": 1 if down else TOPK,
            "num_tokens_post_padded": of("int32", 1), "config": {x: v for x, v in values.items() if x != "USE_TMA"},
            "compute_type": tl.float32 if dtype == "float32" else tl.bfloat16, "block_shape": layer.block and [bn, bk],
            "per_channel_quant": "per_channel_quant=True" in file.rest,
            **{f"use_{d}": d == dtype for d in ("fp8_w8a8", "int8_w8a8", "int8_w8a16", "int4_w4a16")},
        }  # fmt: skip
        moe = self.engine.moe
        # activations come quantized, and the CUDA kernel for 4 bits reads no config file
        quantizers = [name for name in vars(moe) if re.search("_quant_(fp|int)8$|_fp8_quant$", name)]
        ours = dict.fromkeys(quantizers, lambda a, *_, **__: (a, a_scale))
        with replaced(moe, {**ours, "invoke_fused_moe_wna16_cuda_kernel": lambda *_: None}):
            _by_name(getattr(moe, "dispatch_fused_moe_kernel", None) or moe.invoke_fused_moe_kernel, given)

    def _of(self, dtype: str, *sizes: int) -> torch.Tensor:
        fp8 = torch.float8_e4m3fnuz if str(self.engine.device.arch).startswith("gfx94") else torch.float8_e4m3fn
        known = {"fp8": fp8, "int8": torch.int8, "int4": torch.uint8, "float32": torch.float32, "int32": torch.int32}
        return torch.empty(*sizes, dtype=known.get(dtype.partition("_")[0], torch.bfloat16), device="meta")


_latest_lookups = lru_cache(1)(Lookups)


class Source(NamedTuple):
    """Compiles entries in the processes of a pool."""

    package: Path

    def enter(self, target: Target) -> None:
        """Has nothing to do: what is loaded depends on the entry."""

    def compile(self, entry: Entry, target: Target) -> CompileFacts:
        """Raises what the compiler raises."""
        lookups = _latest_lookups(self.package, entry.file.device, entry.file.arch)
        with compiling() as kernels:
            lookups.launch(entry.file, lookups.ask(entry.file), entry.m, entry.values)
        return facts_of(kernels)


def compile_all(
    package: Path, entries: Sequence[Entry], cores: int, say: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Results by key, each with its status and facts. They are kept in a file, and not compiled again."""
    path = CACHE.expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    done = {result["key"]: result for result in map(json.loads, path.read_text().splitlines())}
    wanted = {e.key: e for e in entries}
    left = sorted(wanted.keys() - done.keys(), key=lambda key: (str(wanted[key].file.arch), wanted[key].file.device))
    begin, count = time.monotonic(), 0
    for arch, keys in groupby(left, key=lambda key: wanted[key].file.arch):
        jobs = [(key, wanted[key]) for key in keys]
        until = count + len(jobs)
        with closing(CompilePool(cores, cast(KernelSource, Source(package)), target_of(arch or 0), {})) as pool:
            pool.want(jobs)
            while count < until:
                connection.wait(pool.connections, 1.0)
                for r in pool.collect():
                    count += 1
                    done[r.name] = {"key": r.name, "status": r.status, "detail": clean(r.detail, 300)}
                    done[r.name] |= asdict(r.facts) if r.facts else {}
                    if r.facts or r.status == "unsupported":  # a crash may have another cause
                        with path.open("a") as file:
                            file.write(json.dumps(done[r.name]) + "\n")
                    if count % 20 == 0 or count == len(left):
                        rate = count / (time.monotonic() - begin)
                        say(f"{count} of {plural(len(left), 'entry', 'entries')} compiled, {rate:.1f} a second")
    return {key: done[key] for key in wanted}


def target_of(arch: int | str) -> Target:
    """The target that Triton compiles for."""
    if isinstance(arch, int):
        return replace(known(90), arch=arch, shared_bytes=_SHARED_BYTES[arch])
    shared = LDS_BYTES.get(arch, 65536)
    return replace(known("gfx942"), arch=arch, warp_size=32 if arch.startswith("gfx1") else 64, shared_bytes=shared)


@cache
def rocm_names(package: Path) -> tuple[str, ...]:
    """Names that vLLM's own map gives to AMD's device ids; none for SGLang, which takes torch's names."""
    path = package / "platforms" / "rocm.py"
    text = path.read_text() if path.is_file() else ""
    found = re.search(r"^_ROCM_DEVICE_ID_NAME_MAP\b.*?= (\{.*?^\})", text, re.MULTILINE | re.DOTALL)
    return tuple(ast.literal_eval(found[1]).values()) if found else ()


def _by_name(function: Callable[..., Any], given: Values) -> Any:
    return function(**{name: given[name] for name in inspect.signature(function).parameters if name in given})


def _functions(module: str) -> list[Any]:
    """A module's own functions; those that a cache wraps without it."""
    found = [inspect.unwrap(f) for f in vars(sys.modules[module]).values() if callable(f)]
    return [f for f in found if inspect.isfunction(f) and f.__module__ == module]


def _parts(path: Path) -> list[str]:
    return re.split(r",(?=[a-z])", path.name.removesuffix(".json"))


@cache
def _sources(package: Path) -> dict[str, str]:
    """Source texts of the modules beside an engine's config folders, by the modules' names."""
    files = [path for folder in FOLDERS[package.name] for path in sorted((package / folder).glob("*.py"))]
    return {".".join(f.relative_to(package.parent).with_suffix("").parts): f.read_text() for f in files}


def _dtypes(sources: Iterable[str]) -> list[str | None]:
    """Values that `dtype` of a MoE look-up can have, by the engine's own function, cut out of its module."""
    trees = [ast.parse(text) for text in sources if f"{_DTYPE}(" in text]
    node = next(n for t in trees for n in t.body if isinstance(n, ast.FunctionDef) and n.name.endswith(_DTYPE))
    space: Values = {"torch": torch}
    exec(f"from __future__ import annotations\n{ast.unparse(node)}", space)
    dtype_of = space[node.name]
    flags = [name for name in inspect.signature(dtype_of).parameters if name.startswith("use_")]
    plain = [dtype_of(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
    return list(dict.fromkeys((*plain, *(dtype_of(torch.bfloat16, **{flag: True}) for flag in flags))))
