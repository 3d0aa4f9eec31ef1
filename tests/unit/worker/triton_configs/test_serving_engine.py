"""The real files of vLLM and SGLang, loaded without a GPU: file names, look-ups, defaults, launches, and the stubs."""

from __future__ import annotations

import ast
import json
import os
import shutil
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.engines import ENGINES, H200, MI300X, MI355X, copy, tree, wheel
from tests.support.marks import WITH_ENGINE
from tests.waiting import PATIENCE_S
from worker.foreign.runner import ForeignCodeError
from worker.foreign.values import encode
from worker.triton_configs import engine_package
from worker.triton_configs.engine_modules import Stub
from worker.triton_configs.engine_package import (
    EngineDevice,
    Layer,
    ServingEngineError,
    detect_device,
    locate_engine,
    unpack_wheel,
)
from worker.triton_configs.serving_engine import ServingEngine, ask_engine, load_engine

pytestmark = WITH_ENGINE

LINEAR = Layer("linear", 2112, 7168, dtype="fp8_w8a8", block=(128, 128))
MOE = Layer("moe", 256, 7168, e=256, topk=8, dtype="fp8_w8a8", block=(128, 128))
BF16 = Layer("moe", 7168, 4096, e=8, topk=2)
VLLM_LINEAR = "vllm/model_executor/layers/quantization/utils/configs"
VLLM_MOE = "vllm/model_executor/layers/fused_moe/configs"
SGLANG_LINEAR = "sglang/kernels/ops/gemm/configs"
SGLANG_MOE = "sglang/srt/layers/moe/moe_runner/triton_utils/configs"


def tile(m: int, n: int, k: int, group: int, warps: int, stages: int) -> dict[str, int]:
    return {
        "BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": k, "GROUP_SIZE_M": group, "num_warps": warps,
        "num_stages": stages,
    }  # fmt: skip


def own(project: str, folder: Path, device: EngineDevice = H200) -> ServingEngine:
    """An engine whose files the test may change."""
    return load_engine(copy(project, folder), device)


NAMES = [
    ("vllm", H200, LINEAR, "N=2112,K=7168,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"),
    ("vllm", EngineDevice("NVIDIA H200 NVL", 90), LINEAR,
     "N=2112,K=7168,device_name=NVIDIA_H200_NVL,dtype=fp8_w8a8,block_shape=[128,128].json"),
    ("vllm", EngineDevice("NVIDIA H200 NVL", 90), MOE,
     "E=256,N=256,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"),
    ("vllm", MI355X, BF16, "E=8,N=7168,device_name=AMD_Instinct_MI355X.json"),
    ("vllm", EngineDevice("AMD Radeon AI / PRO", "gfx1201"), BF16, "E=8,N=7168,device_name=AMD_Radeon_AI_PRO.json"),
    ("sglang", H200, LINEAR, "N=2112,K=7168,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128].json"),
    ("sglang", EngineDevice("NVIDIA H200 NVL", 90), MOE,
     "E=256,N=256,device_name=NVIDIA_H200_NVL,dtype=fp8_w8a8,block_shape=[128, 128].json"),
    ("sglang", MI355X, BF16, "E=8,N=7168,device_name=AMD_Instinct_MI355X.json"),
]  # fmt: skip


@pytest.mark.parametrize(("project", "device", "layer", "name"), NAMES)
def test_file_names_are_those_of_the_engine(project: str, device: EngineDevice, layer: Layer, name: str) -> None:
    assert load_engine(tree(project), device).file_name(layer) == name


@pytest.mark.parametrize(("project", "layer", "folder"), [
    ("vllm", LINEAR, VLLM_LINEAR), ("vllm", MOE, VLLM_MOE), ("sglang", LINEAR, SGLANG_LINEAR),
])  # fmt: skip
def test_the_engine_looks_into_its_own_folder(project: str, layer: Layer, folder: str) -> None:
    assert load_engine(tree(project), H200).folders(layer) == [tree(project) / folder]


@pytest.mark.parametrize(("project", "device", "layer"), [("vllm", H200, LINEAR), ("vllm", H200, MOE),
                                                          ("sglang", MI300X, MOE)])  # fmt: skip
def test_a_table_is_what_the_found_file_says_in_its_order(project: str, device: EngineDevice, layer: Layer) -> None:
    engine = load_engine(tree(project), device)
    found, table = engine.file_read(layer), engine.table(layer)
    assert found is not None
    assert table is not None
    assert found.name == engine.file_name(layer)
    written = json.loads(found.read_text())
    written.pop("triton_version", None)
    assert list(table.items()) == [(int(m), values) for m, values in written.items()]


DEFAULTS = [
    ("vllm", H200, Layer("linear", 1, 64, dtype="fp8_w8a8", block=(128, 128)), 5, tile(64, 128, 128, 32, 4, 2)),
    ("sglang", H200, Layer("linear", 1, 64, dtype="fp8_w8a8", block=(128, 128)), 5, tile(64, 128, 128, 32, 4, 3)),
    ("vllm", H200, Layer("moe", 3, 64, 7, 2, "fp8_w8a8", (128, 128)), 4, {**tile(16, 64, 128, 1, 4, 4), "SPLIT_K": 1}),
    ("vllm", MI300X, Layer("moe", 3, 64, 7, 2, "fp8_w8a8", (128, 128)), 4,
     {**tile(16, 128, 128, 1, 4, 2), "SPLIT_K": 1}),
    ("vllm", H200, Layer("moe", 3, 64, 7, 2), 4096, {**tile(128, 128, 64, 16, 8, 3), "SPLIT_K": 1}),
    ("sglang", H200, Layer("moe", 3, 64, 7, 2, "fp8_w8a8", (128, 128)), 4, tile(64, 128, 128, 32, 4, 3)),
    ("sglang", MI300X, Layer("moe", 3, 64, 7, 2, "fp8_w8a8", (128, 128)), 4, tile(64, 128, 128, 32, 4, 2)),
    ("sglang", H200, Layer("moe", 3, 64, 7, 2, "fp8_w8a8"), 4, tile(64, 128, 128, 1, 4, 4)),
    ("sglang", EngineDevice("NVIDIA L40S", 89), Layer("moe", 3, 64, 7, 2, "fp8_w8a8"), 4, tile(32, 64, 256, 1, 4, 4)),
]  # fmt: skip


@pytest.mark.parametrize(("project", "device", "layer", "m", "values"), DEFAULTS)
def test_without_a_file_the_config_is_the_engines_default(
    project: str, device: EngineDevice, layer: Layer, m: int, values: dict[str, int]
) -> None:
    engine = load_engine(tree(project), device)
    assert (engine.table(layer), engine.file_read(layer)) == (None, None)
    assert engine.config(layer, m) == values


@pytest.mark.parametrize("layer", [LINEAR, MOE])
@pytest.mark.parametrize("project", ENGINES)
def test_the_nearest_key_serves_and_of_two_the_first_in_the_file(tmp_path: Path, project: str, layer: Layer) -> None:
    engine = own(project, tmp_path)
    entries = {m: tile(16, 32, 128, m, 4, 3) for m in (64, 32, 128)}
    for folder in engine.folders(layer):
        folder.mkdir(exist_ok=True)
        (folder / engine.file_name(layer)).write_text(json.dumps(entries))
    served = [engine.config(layer, m)["GROUP_SIZE_M"] for m in (1, 47, 48, 49, 96, 97, 9999)]
    assert served == [32, 32, 64, 64, 64, 128, 128]


def test_a_new_file_counts_at_once(tmp_path: Path) -> None:
    engine = own("vllm", tmp_path)
    layer = Layer("linear", 11, 64, dtype="fp8_w8a8", block=(128, 128))
    assert engine.table(layer) is None
    path = engine.folders(layer)[0] / engine.file_name(layer)
    path.write_text(json.dumps({"1": tile(16, 16, 64, 1, 4, 2)}))
    assert (engine.file_read(layer), engine.config(layer, 8)) == (path, tile(16, 16, 64, 1, 4, 2))


def test_vllms_own_folder_of_configs_comes_first_for_moe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load_engine(tree("vllm"), H200)
    monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", str(tmp_path))
    assert engine.folders(MOE) == [tmp_path, tree("vllm") / VLLM_MOE]
    assert engine.folders(LINEAR) == [tree("vllm") / VLLM_LINEAR]
    (tmp_path / engine.file_name(MOE)).write_text('{"triton_version": "3.8.0", "8": {"BLOCK_SIZE_M": 32}}')
    assert engine.file_read(MOE) == tmp_path / engine.file_name(MOE)
    assert engine.table(MOE) == {8: {"BLOCK_SIZE_M": 32}}


def test_sglang_takes_the_newest_folder_after_that_of_its_triton(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load_engine(tree("sglang"), H200)
    monkeypatch.setattr("triton.__version__", "3.5.1")
    names = [folder.name for folder in engine.folders(MOE)]
    assert names[:3] == ["triton_3_5_1", "triton_3_8_0", "triton_3_7_1"]
    monkeypatch.setenv("SGLANG_MOE_CONFIG_DIR", str(tmp_path))
    (tmp_path / "configs" / "triton_3_4_0").mkdir(parents=True)
    assert [str(f.relative_to(tmp_path)) for f in engine.folders(MOE)] == [
        "configs/triton_3_5_1", "configs/triton_3_4_0",
    ]  # fmt: skip


def test_a_server_in_a_special_mode_reads_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load_engine(tree("vllm"), H200)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(ServingEngineError, match="special mode"):
        engine.file_name(MOE)
    assert engine.config(LINEAR, 16) == tile(64, 128, 128, 32, 4, 2)


@pytest.mark.parametrize(("device", "swapped"), [(H200, True), (MI300X, False)])
def test_a_launch_of_moe_is_the_launchers_own(device: EngineDevice, swapped: bool) -> None:
    torch = pytest.importorskip("torch")
    import triton.language as tl

    def hollow(*size: int, dtype: object = torch.float8_e4m3fn) -> object:
        return torch.empty(*size, dtype=dtype, device="meta")

    engine = load_engine(tree("vllm"), device)
    ids = hollow(64, dtype=torch.int32)
    operands = hollow(16, 256), hollow(4, 512, 256), hollow(16, 2, 512, dtype=torch.bfloat16)
    scales = hollow(16, 2, dtype=torch.float32), hollow(4, 4, 2, dtype=torch.float32)
    config = tile(16, 64, 256, 1, 4, 3)

    def call() -> None:
        kinds = True, False, False, False, False
        engine.moe.invoke_fused_moe_triton_kernel(
            *operands, *scales, None, ids, ids, ids, False, 2, config, tl.bfloat16, *kinds, [128, 128]
        )

    (launch,) = engine.launches("moe", call)
    assert launch.kernel is engine.kernel("moe") is engine.moe.fused_moe_kernel
    wanted = {**tile(16, 64, 128, 1, 4, 3), "SPLIT_K": 1, "SWAP_AB": swapped, "USE_TD": False}
    assert {key: launch.named[key] for key in wanted} == wanted
    assert launch.grid(config) == (4 * 8,)


@pytest.mark.parametrize("project", ENGINES)
def test_source_hashes_tell_versions_apart(tmp_path: Path, project: str) -> None:
    engine = own(project, tmp_path)
    before = engine.source_hash("linear"), engine.source_hash("moe")
    assert load_engine(tree(project), MI300X).source_hash("linear") == before[0]
    with open(engine.fp8.__file__, "a") as file:
        file.write("# changed\n")
    assert engine.source_hash("linear") != before[0]
    assert engine.source_hash("moe") == before[1]


def told(root: Path, layers: list[Layer]) -> list[Any]:
    """Facts of layers by an engine, and its variables."""
    out: list[Any] = [sorted(name for name in os.environ if name.startswith(("VLLM_", "SGLANG_")))]
    for device in (H200, MI300X):
        engine = load_engine(root, device)
        for x in layers:
            out += [engine.file_name(x), engine.folders(x), engine.table(x), engine.file_read(x), engine.config(x, 48)]
            out.append(engine.source_hash(x.op))
    return out


@pytest.mark.parametrize("project", ENGINES)
def test_a_fresh_process_answers_the_same(tmp_path: Path, project: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = own(project, tmp_path)
    broken = Layer("linear", 11, 64, dtype="fp8_w8a8", block=(128, 128))
    (engine.folders(broken)[0] / engine.file_name(broken)).write_text('{"triton_version": "3.8.0"}')
    here = told(tmp_path, [LINEAR, MOE, BF16])
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setenv("SGLANG_MOE_CONFIG_DIR", "nowhere")
    variables, *answers = ask_engine({"VLLM_PLUGINS": ""}, told, tmp_path, [LINEAR, MOE, BF16])
    assert (variables, answers) == (["VLLM_PLUGINS"], json.loads(json.dumps(encode(here[1:]))))
    monkeypatch.undo()
    with pytest.raises(ServingEngineError, match="ValueError: invalid literal"):
        engine.table(broken)
    with pytest.raises(ServingEngineError, match="only fp8_w8a8"):
        engine.table(Layer("linear", 1, 1))


def test_nothing_can_be_asked_of_no_engine(tmp_path: Path) -> None:
    with pytest.raises(ServingEngineError, match="holds neither vLLM nor SGLang"):
        ask_engine({}, told, tmp_path, [LINEAR])
    with pytest.raises(ForeignCodeError, match="ended with status 3"):
        ask_engine({}, die, 3)


def die(status: int) -> int:
    os._exit(status)


# --- where it is ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("project", ENGINES)
def test_an_engine_is_found_by_its_package_or_what_holds_it(tmp_path: Path, project: str) -> None:
    root = copy(project, tmp_path / "unpacked")
    package = root / project
    version = ENGINES[project]
    assert locate_engine(root) == locate_engine(package) == (project, package, version)
    checkout = tmp_path / "checkout" / "python"
    checkout.mkdir(parents=True)
    package.rename(checkout / project)
    assert locate_engine(checkout.parent)[1] == checkout / project
    (checkout / project / "_version.py").unlink()
    assert locate_engine(checkout)[2] == ""


def test_of_two_engines_one_has_to_be_named(tmp_path: Path) -> None:
    copy("vllm", tmp_path)
    copy("sglang", tmp_path)
    with pytest.raises(ServingEngineError, match=r"holds both: name one of .*vllm, .*sglang"):
        locate_engine(tmp_path)
    assert locate_engine(tmp_path / "sglang")[0] == "sglang"


def test_an_incomplete_engine_is_told(tmp_path: Path) -> None:
    root = copy("vllm", tmp_path)
    (root / "vllm/utils/math_utils.py").unlink()
    with pytest.raises(ServingEngineError, match=r"vllm\.utils\.math_utils cannot be loaded: FileNotFoundError"):
        load_engine(root, H200)
    (root / "vllm/utils/math_utils.py").write_text("import nowhere")
    with pytest.raises(ServingEngineError, match=r"math_utils cannot be loaded: ModuleNotFoundError: .*nowhere"):
        load_engine(root, H200)
    fp8_utils = root / "vllm/model_executor/layers/quantization/utils/fp8_utils.py"
    shutil.copy(tree("vllm") / "vllm/utils/math_utils.py", root / "vllm/utils/math_utils.py")
    fp8_utils.write_text(fp8_utils.read_text().replace("get_w8a8_block_fp8_configs", "get_other"))
    with pytest.raises(
        ServingEngineError, match=r"version that is known: vllm\..*fp8_utils has no get_w8a8_block_fp8_c"
    ):
        load_engine(root, H200)


def test_a_file_that_is_no_wheel_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.whl").write_text("nothing")
    with pytest.raises(ServingEngineError, match="cannot be read as a wheel"):
        unpack_wheel(tmp_path / "a.whl", tmp_path)


class Properties(NamedTuple):
    """A GPU for torch's answers."""

    name: str = "NVIDIA H200"
    major: int = 9
    minor: int = 0
    gcnArchName: str = "gfx950:sramecc+:xnack-"


def test_the_devices_name_is_told_by_vllm_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = copy("vllm", tmp_path)
    with pytest.raises(ServingEngineError, match="torch sees no GPU here"):
        detect_device(root)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: Properties())
    assert detect_device(root) == (H200, "torch")
    (root / "vllm" / "platforms.py").write_text(
        "class current_platform:\n    get_device_name = lambda index: 'NVIDIA H200 NVL'\nprint('a warning')"
    )
    assert detect_device(root) == (EngineDevice("NVIDIA H200 NVL", 90), "vllm.platforms")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise ImportError('no amdsmi here')", "ImportError: no amdsmi here"),
        ("import os; os._exit(7)", "it ended with code 7"),
        ("import time; time.sleep(1000)", "no answer within 0 s"),
    ],
)
def test_a_name_that_vllm_does_not_tell_is_torchs_on_nvidia_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, reason: str
) -> None:
    root = copy("vllm", tmp_path)
    (root / "vllm" / "platforms.py").write_text(code)
    monkeypatch.setattr(engine_package, "VLLM_IMPORT_S", 0 if "sleep" in code else PATIENCE_S)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: Properties())
    assert detect_device(root) == (H200, "torch")
    monkeypatch.setattr("torch.version.hip", "7.2")
    with pytest.raises(ServingEngineError, match=rf"does not tell this GPU's name.*\({reason}\); use the Python"):
        detect_device(root)


def test_capabilities_are_those_that_torch_reports() -> None:
    archs: tuple[int | str, ...] = (90, 120, "gfx90a", "gfx942", "gfx950", "gfx1201")
    told = [EngineDevice("", arch).capability for arch in archs]
    assert told == [(9, 0), (12, 0), (9, 0), (9, 4), (9, 5), (12, 0)]


# --- stubs ---------------------------------------------------------------------------------------------------------


def defined(root: Path, name: str) -> bool:
    """True if a dotted name is a module of the tree, or is bound in one."""
    module, _, attribute = name.rpartition(".")
    at = root / name.replace(".", "/")
    return at.is_dir() or at.with_suffix(".py").is_file() or attribute in bound(root, module)


@cache
def bound(root: Path, module: str) -> frozenset[str]:
    """The names that a module's statements bind."""
    stem = root / module.replace(".", "/")
    files = [f for f in (stem.with_suffix(".py"), stem / "__init__.py") if f.is_file()]
    return frozenset(name for f in files for name in _bound(root, ast.parse(f.read_text()).body))


def _bound(root: Path, body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.ImportFrom) and node.module and node.names[0].name == "*":
            yield from bound(root, node.module)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name for alias in node.names)
        else:
            yield from (n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
            yield from _bound(root, [n for n in ast.iter_child_nodes(node) if isinstance(n, ast.stmt)])


def stubbed(project: str) -> Iterator[str]:
    """Dotted names of what stands for a module, or a name in one, of the engine that is loaded; the supplied too."""
    for module, stub in list(sys.modules.items()):
        if module.partition(".")[0] == project and isinstance(stub, Stub):
            yield module
            yield from (f"{module}.{name}" for name in vars(stub) if not name.startswith("_"))


@pytest.mark.parametrize("device", [H200, MI300X])
@pytest.mark.parametrize("project", ENGINES)
def test_the_names_that_are_stubbed_or_supplied_exist_upstream(project: str, device: EngineDevice) -> None:
    load_engine(tree(project), device)
    names = set(stubbed(project))
    assert len(names) > 40
    assert not {name for name in names if not defined(tree(project), name)}


def test_using_a_stubs_value_is_an_error() -> None:
    stub = Stub("vllm.thing", {})
    for use in (bool, len, list, lambda s: s == 1, lambda s: s(), lambda s: 1 in s, lambda s: s.deeper()):
        with pytest.raises(ServingEngineError, match=r"vllm\.thing"):
            use(stub)


def test_a_later_engine_replaces_the_earlier(tmp_path: Path) -> None:
    assert load_engine(tree("vllm"), H200).device == H200
    engine = load_engine(tree("vllm"), MI300X)
    assert engine.file_name(MOE).startswith("E=256,N=256,device_name=AMD_Instinct_MI300X")
    assert engine.package == tree("vllm") / "vllm"
    assert wheel("vllm").name.startswith("vllm-0.33.0")
