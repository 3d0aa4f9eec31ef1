# ruff: noqa: E501 - the lines are the engines'
"""`shapes from-log`: lines of vLLM and SGLang about a missing config file, and PyTorch's lists of untuned GEMMs."""

from __future__ import annotations

import ast
import importlib.util
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.families import get_family
from orchestrator.shapes.aiter_log import CUT, Misses
from orchestrator.shapes.reader import read_shapes
from tests.kits.fleet import Done, command
from tests.paths import TEST_DATA
from tests.support.engines import H200, MI355X, tree
from tests.support.marks import WITH_TRANSFORMERS
from worker.triton_configs.engine_package import EngineDevice, Layer
from worker.triton_configs.m_ranges import USUAL_KEYS
from worker.triton_configs.serving_engine import load_engine

FP8, BF16 = "torch.float8_e4m3fn", "torch.bfloat16"
LINEAR = Layer("linear", 2112, 7169, dtype="fp8_w8a8", block=(128, 128))
BLOCK = Layer("moe", 257, 7168, e=16, topk=8, dtype="fp8_w8a8", block=(128, 128))
PLAIN = Layer("moe", 8193, 4096, e=16, topk=2, dtype="fp8_w8a8")
HALF = Layer("moe", 8193, 4096, e=16, topk=2)
KEYS: dict[Layer, tuple[str, dict[str, str]]] = {
    LINEAR: ("a8w8_blockscale", {"N": "2112", "K": "7169"}),
    BLOCK: (
        "fmoe",
        {"inter_dim": "257", "expert": "16", "q_dtype_a": FP8, "q_dtype_w": FP8, "q_type": "QuantType.per_1x128"},
    ),
    PLAIN: (
        "fmoe",
        {"inter_dim": "8193", "expert": "16", "q_dtype_a": FP8, "q_dtype_w": FP8, "q_type": "QuantType.per_Tensor"},
    ),
    HALF: (
        "fmoe",
        {"inter_dim": "8193", "expert": "16", "q_dtype_a": BF16, "q_dtype_w": BF16, "q_type": "QuantType.No"},
    ),
}
DEVICES = [H200, MI355X, EngineDevice("NVIDIA H100 80GB HBM3", 90)]


class Lines(logging.Handler):
    """The lines of an engine's logger, with what its own log has around a message."""

    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.setFormatter(formatter)

    def emit(self, record: logging.LogRecord) -> None:
        record.vllm_process_name = "EngineCore_DP0"
        self.lines.append(self.format(record))


def vllm_formatters() -> list[logging.Formatter]:
    """vLLM's, plain and with colours, from its own files."""
    folder = tree("vllm") / "vllm"
    spec = importlib.util.spec_from_file_location("vllm_formatter", folder / "logging_utils" / "formatter.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    source = ast.parse((folder / "logger.py").read_text())
    (text,) = [n.value for n in source.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "_FORMAT"]
    form = eval(ast.unparse(text), {"envs": SimpleNamespace(VLLM_LOGGING_PREFIX="node3 ")})
    classes: list[Any] = [module.NewLineFormatter, module.ColoredFormatter]
    return [cls(form, datefmt="%m-%d %H:%M:%S") for cls in classes]


def logged(project: str, layer: Layer, device: EngineDevice, handler: Lines) -> list[str]:
    """The lines that the engine's look-up logs for a layer without a file."""
    engine = load_engine(tree(project), device)
    logger = logging.Logger("engine")
    logger.addHandler(handler)
    vars(logger)["warning_once"] = vars(logger)["info_once"] = lambda text, *args, **_: logger.warning(text, *args)
    theirs = logging.getLogger("sglang")
    if project == "vllm":
        for module in (engine.fp8, engine.moe):
            vars(module)["logger"] = logger
    else:
        theirs.addHandler(handler)
        theirs.setLevel(logging.INFO)
    try:
        assert engine.table(layer) is None
    finally:
        theirs.removeHandler(handler)
        theirs.setLevel(logging.CRITICAL)  # as the loader leaves it
    return handler.lines


def counted(*lines: str, family: str | None = None) -> Misses:
    counting = Misses(family)
    for line in lines:
        counting.read(line.encode() + b"\r\n")
    return counting.close()


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.name)
@pytest.mark.parametrize("layer", KEYS, ids=("linear", "fp8-block", "fp8", "bf16"))
@pytest.mark.parametrize("project", ["vllm", "sglang"])
def test_lines_that_the_engines_own_look_up_logs(project: str, layer: Layer, device: EngineDevice) -> None:
    forms = vllm_formatters() if project == "vllm" else [logging.Formatter("[%(asctime)s TP0] %(message)s")]
    for form in forms:
        lines = logged(project, layer, device, Lines(form))
        assert lines
        found = counted(*lines)
        family, values = KEYS[layer]
        assert list(found.files) == [(family, tuple(values.items()))], lines
        assert not found.odd


V = "(EngineCore_DP0 pid=71) WARNING 11-03 10:11:12 [fused_moe.py:1165] Using default MoE config. Performance might be sub-optimal! Config file not found at "
S = "[2026-11-03 10:11:12 TP0] Using default MoE kernel config. Performance might be sub-optimal! Config file not found at "
FOLDERS = "/tuned files/E=8,N=3584,device_name=NVIDIA_H200.json, /usr/lib/python3/vllm/configs/E=8,N=3584,device_name=NVIDIA_H200.json"
# fmt: off
TUNED = [
    # an override folder: vLLM names both paths
    (V + FOLDERS, ("fmoe", "3584", "8", "QuantType.No")),
    (S + "/x/configs/triton_3_8_0/E=8,N=3584,device_name=NVIDIA_H200,dtype=fp8_w8a8.json, you can create them with https://github.com/sgl-project/sglang/tree/main/benchmark/kernels/fused_moe_triton",
     ("fmoe", "3584", "8", "QuantType.per_Tensor")),
    # another Triton's file serves meanwhile
    ("Config file not found at /x/triton_3_8_0/E=8,N=3584,device_name=NVIDIA_H200.json. Fallback to triton version 3.5.1 and use MoE kernel config from /x/triton_3_5_1/E=8,N=3584,device_name=NVIDIA_H200.json. Performance might be sub-optimal!",
     ("fmoe", "3584", "8", "QuantType.No")),
    # the second product of the same experts, alone without a file
    ("Down MoE config file not found at /x/triton_3_8_0/E=8,N=64,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128]_down.json; reusing the tuned up-projection config without TMA. Performance might be sub-optimal.",
     ("fmoe", "64", "8", "QuantType.per_1x128")),
    (S + "/x/E=8,N=64,device_name=NVIDIA_H200_down.json, you can create them with https://github.com/sgl-project/sglang/tree/main/benchmark/kernels/fused_moe_triton",
     ("fmoe", "64", "8", "QuantType.No")),
    # a log in JSON
    ('{"message": "' + V + '/x/E=8,N=3584,device_name=AMD_Instinct_MI355X,dtype=fp8_w8a8,block_shape=[128,128].json", "pid": 1}',
     ("fmoe", "3584", "8", "QuantType.per_1x128")),
]
OTHERS = [
    ("vllm", V + "/x/E=8,N=7168,device_name=NVIDIA_H200,dtype=int8_w8a16.json", "E=8,N=7168,device_name=NVIDIA_H200,dtype=int8_w8a16.json"),
    ("vllm", V + "/x/E=8,N=7168,device_name=NVIDIA_H200,dtype=int4_w4a16.json", "dtype=int4_w4a16.json"),
    ("vllm", V + "/x/E=8,N=192,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[64,64].json", "block_shape=[64,64].json"),
    ("vllm", "Using default FlyDSL MoE config. Performance might be sub-optimal! Config file not found at /x/E=8,N=64,device_name=AMD,dtype=int4_w4a16,backend=flydsl.json", "backend=flydsl.json"),
    ("vllm", "Using default Mamba SSU config. Performance might be sub-optimal! Config file not found at /x/headdim=64,dstate=128,device_name=NVIDIA_H200.json", "headdim=64"),
    ("sglang", S + "/x/E=8,N=64,device_name=NVIDIA_H200,dtype=fp8_w8a8,per_channel_quant=True.json", "per_channel_quant=True.json"),
    ("sglang", "Using default W8A8 Block INT8 kernel config. Performance might be sub-optimal! Config file not found at /x/N=64,K=64,device_name=NVIDIA_H200,dtype=int8_w8a8,block_shape=[128, 128].json", "dtype=int8_w8a8"),
    ("sglang", "x Config file not found at /x/N=64,K=64,device_name=NVIDIA_H200,dtype=fp8_w8a8.json", "N=64,K=64"),
    ("sglang", S + "/x/E=8,N=64,device_name=NVIDIA_H200,dtype=int8_w8a8_down.json, you can", "dtype=int8_w8a8_down.json"),
    ("cut", V + "/x/E=8,N=71", "E=8,N=71"),
]
# fmt: on


@pytest.mark.parametrize(("line", "known"), TUNED)
def test_forms_of_a_line(line: str, known: tuple[str, ...]) -> None:
    found = counted(line)
    ((family, named),) = found.files
    values = dict(named)
    assert (family, values["inter_dim"], values["expert"], values["q_type"]) == known
    assert not found.odd


@pytest.mark.parametrize(("project", "line", "name"), OTHERS)
def test_what_cannot_be_tuned_is_counted_by_name(project: str, line: str, name: str) -> None:
    found = counted(line, line)
    ((why, n),) = found.odd.items()
    assert (n, found.files) == (2, {})
    assert why.startswith("a name that breaks off: " if project == "cut" else "gemmfleet does not tune ")
    assert name in why


def test_each_record_of_a_line_counts() -> None:
    """Workers that share a terminal write on one line, or into each other's."""
    gemm = "[aiter] shape is M:72, N:{}, K:7168, not found tuned config in /x/a8w8_blockscale_tuned_gemm.csv, will use default config!"
    found = counted(
        gemm.format(512) + gemm.format(2112),
        V + "/x/E=128,N=384,device_name=Tesla_T4.json " + V + "/x/E=64,N=512,device_name=Tesla_T4.json",
        "[aiter] shape is M:72, N:51" + gemm.format(1024),
        "[aiter] [fused_moe] using 2stage default for (256, 16, 40" + gemm.format(1536),
    )
    assert [key[1] for key in found.counts["a8w8_blockscale"]] == [512, 2112, 1024, 1536]
    assert [dict(values)["inter_dim"] for _, values in found.files] == ["384", "512"]
    assert found.odd == {CUT: 2}


def test_other_programs_words_and_found_files_say_nothing() -> None:
    found = counted(
        "Using configuration from /x/E=8,N=64,device_name=NVIDIA_H200.json for MoE layer.",
        "Config file for E=8,N=64,device_name=NVIDIA_H200.json was read",
    )
    assert (found.files, found.odd) == ({}, {})


# --- TunableOp ---------------------------------------------------------------------------------------------------------

BLAS = "- { function: matmul, M: 8192, N: 1, K: 4096, lda: 4096, ldb: 4096, ldc: 8192 }"
# fmt: off
UNTUNED = [
    # F.linear of x [1, 4096] with W [8192, 4096]
    ("GemmTunableOp_BFloat16_TN,tn_8192_1_4096_ld_4096_4096_8192", (1, 8192, 4096, "False", BF16)),
    (f"GemmTunableOp_BFloat16_TN,tn_8192_1_4096_ld_4096_4096_8192,{BLAS}", (1, 8192, 4096, "False", BF16)),
    ("GemmTunableOp_Half_TN,tn_8192_16_4096", (16, 8192, 4096, "False", "torch.float16")),
    ("GemmTunableOp_tf32_TN,tn_3_2_5_ld_5_5_3", (2, 3, 5, "False", "torch.float32")),
    ("GemmAndBiasTunableOp_BFloat16_TN,tn_1280_7_2880_ld_2880_2880_1280", (7, 1280, 2880, "True", BF16)),
]
# fmt: on


@pytest.mark.parametrize(("line", "key"), UNTUNED)
def test_untuned_gemms_of_pytorch(line: str, key: tuple[Any, ...]) -> None:
    (found,) = counted(line).counts["a16w16"]
    m, n, k, bias, dtype = key
    assert found == (m, n, k, bias, dtype, dtype, "False", "False")


def test_the_sizes_are_those_that_pytorch_reads_from_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own offline tuner makes the operands of x @ W.T from the same line."""
    torch = pytest.importorskip("torch")
    from torch.cuda import tunable

    made: list[tuple[Any, Any]] = []
    create: Any = tunable._create_matrices
    monkeypatch.setattr(tunable, "_create_matrices", lambda *a, **k: create(*a[:9], "cpu", *a[10:], **k))
    monkeypatch.setattr(torch, "mm", lambda a, b: made.append((a, b)))
    tunable._process_single_offline_gemm("GemmTunableOp_BFloat16_TN,tn_96_5_64_ld_64_64_96", 0)
    ((x, w),) = made
    (key,) = counted("GemmTunableOp_BFloat16_TN,tn_96_5_64_ld_64_64_96").counts["a16w16"]
    assert (x.shape, w.shape) == ((key[0], key[2]), (key[2], key[1]))
    assert x.is_contiguous()
    assert w.t().is_contiguous()  # [N, K] row-major


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("GemmTunableOp_BFloat16_NN,nn_8192_1_4096_ld_8192_4096_8192", "GemmTunableOp_BFloat16_NN"),
        ("GemmTunableOp_double_TN,tn_8192_1_4096_ld_4096_4096_8192", "GemmTunableOp_double_TN"),
        ("GemmStridedBatchedTunableOp_BFloat16_TN,tn_64_8_64_B_16_ld_64_64_64", "GemmStridedBatchedTunableOp"),
        (
            "ScaledGemmTunableOp_Float8_e4m3fn_Float8_e4m3fn_BFloat16_TN,tn_64_8_64_ld_64_64_64_rw_1_bias_None",
            "ScaledGemm",
        ),
    ],
)
def test_other_gemms_of_pytorch_are_named(line: str, what: str) -> None:
    found = counted(line)
    assert found.counts == {}
    assert what in next(iter(found.odd))


def test_tuned_gemms_and_validators_say_nothing() -> None:
    found = counted(
        "Validator,PT_VERSION,2.9.1", "GemmTunableOp_BFloat16_TN,tn_8192_1_4096_ld_4096_4096_8192,Gemm_Rocblas_6,0.0196",
        "finding fastest for GemmTunableOp_BFloat16_TN(tn_8192_1_4096_ld_4096_4096_8192) out of 7 candidates",
    )  # fmt: skip
    assert (found.counts, found.odd) == ({}, {})


# --- the command -------------------------------------------------------------------------------------------------------

W = "Using default W8A8 Block FP8 kernel config. Performance might be sub-optimal! Config file not found at /x/"
LOG = [
    W + "N=1280,K=4096,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json",
    W + "N=4096,K=1024,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json",
    V + "/x/E=128,N=384,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json",
    V + "/x/E=8,N=64,device_name=NVIDIA_H200,dtype=int4_w4a16.json",
    "noise",
]
pytestmark = [pytest.mark.usefixtures("classes_here"), WITH_TRANSFORMERS]
QWEN = TEST_DATA / "models" / "engines" / "qwen3-235b-a22b-fp8.json"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    file = tmp_path / "serve.log"
    file.write_text("\n".join([*LOG, LOG[0]]))
    return file


def from_log(*args: object) -> Done:
    return command("shapes", "from-log", *args)


def test_files_become_lists_with_every_usual_m(log: Path, tmp_path: Path) -> None:
    out = tmp_path / "missed.csv"
    done = from_log(log, "--model", QWEN, "-o", out).ok()
    linear = read_shapes(tmp_path / "missed-a8w8_blockscale.csv", get_family("a8w8_blockscale")).shapes
    assert {s.key for s in linear} == {(m, n, k) for m in USUAL_KEYS for n, k in ((1280, 4096), (4096, 1024))}
    fmoe = read_shapes(tmp_path / "missed-fmoe.csv", get_family("fmoe")).shapes
    rest = ("ActivationType.Silu", BF16, FP8, FP8, "QuantType.per_1x128", 1, 0)
    assert [s.key for s in fmoe] == [(m, 4096, 384, 128, 8, *rest) for m in USUAL_KEYS]
    assert "a8w8_blockscale: 36 shapes from 3 lines" in done.out
    assert "fmoe: 18 shapes from 1 line " in done.out
    assert "left out 1 line: gemmfleet does not tune E=8,N=64,device_name=NVIDIA_H200,dtype=int4_w4a16.json" in done.out
    document = from_log(log, "--model", QWEN, "-o", out, "--force", "--json").json()
    assert {x["family"]: x["lines"] for x in document["families"]} == {"a8w8_blockscale": 3, "fmoe": 1}


@pytest.mark.parametrize(("lines", "families"), [(LOG, ["a8w8_blockscale", "fmoe"]), (LOG[:2], ["a8w8_blockscale"])])
def test_one_tune_takes_all_lists_of_a_log(tmp_path: Path, lines: list[str], families: list[str]) -> None:
    (tmp_path / "serve.log").write_text("\n".join(lines))
    (tmp_path / "inv.yaml").write_text("defaults: {tuner: vllm}\nnodes: {here: {}}\n")
    from_log(tmp_path / "serve.log", "--model", QWEN, "-o", tmp_path / "shapes.csv").ok()
    lists = sorted(tmp_path.glob("shapes*.csv"))
    done = command("tune", *lists, "-i", tmp_path / "inv.yaml", "--plan", "--json").ok()
    runs = done.json().get("runs", [done.json()])
    assert [(r["family"], r["todo"]) for r in runs] == [(f, {"fmoe": 18}.get(f, 36)) for f in families]
    command("shapes", "check", lists[-1]).ok()


def test_sizes_that_no_name_has_are_asked_for(log: Path, tmp_path: Path) -> None:
    out = tmp_path / "missed.csv"
    lacking = from_log(log, "-o", out)
    lacking.failed_with(2, "fmoe", "model_dim is missing", "--model CONFIG.json", "--set", "topk")
    one = from_log(log, "--family", "a8w8_blockscale", "--m", "1,33")  # the experts' file needs no sizes then
    assert one.out == "M,N,K,count\n1,1280,4096,2\n33,1280,4096,2\n1,4096,1024,1\n33,4096,1024,1\n"
    assert "left out, of other families: fmoe" in one.err
    from_log(log, "--family", "a16w16").failed_with(2, "left out, of other families: a8w8_blockscale, fmoe")
    given = from_log(log, "--family", "fmoe", "--m", "5", "--set", "model_dim=4096", "--set", "topk=8")
    assert given.out.splitlines()[1].startswith("5,4096,384,128,8,ActivationType.Silu,torch.bfloat16,")
    for more, told in (
        (["--set", "model_dim=4096", "--set", "topk=no"], "topk"),
        (["--set", "topk"], "write COLUMN=VALUE"),
        (["--model", TEST_DATA / "models" / "llama-3-8b.json"], "the model has no experts"),
        (["--m", "0"], "--m"),
    ):
        from_log(log, "--family", "fmoe", *more).failed_with(2, told)


def test_a_list_of_pytorch_is_read_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "tunableop_untuned0.csv"
    file.write_text("\n".join(line for line, _ in UNTUNED[:1]) + "\n")
    done = from_log(file)
    assert done.out.splitlines()[1] == f"1,8192,4096,False,{BF16},{BF16},False,False,1"


DEEPSEEK = TEST_DATA / "models" / "deepseek-v3.json"


@pytest.mark.parametrize(
    ("size", "model", "more", "topk"),
    [
        ("E=256,N=256", DEEPSEEK, (), 8),
        ("E=257,N=256", DEEPSEEK, (), 9),  # the shared expert is fused
        ("E=33,N=2048", DEEPSEEK, (), 9),
        ("E=32,N=2048", DEEPSEEK, (), 8),
        ("E=36,N=2048", DEEPSEEK, ("--set", "topk=8"), 8),  # redundant experts
        ("E=22,N=1536", QWEN, (), 8),  # six ranks: 22, 22, 21, 21, 21, 21
        ("E=288,N=256", DEEPSEEK, (), "E=288,N=256, and the model has 256 experts of width 2048"),
        ("E=256,N=300", DEEPSEEK, (), "--set expert=... --set topk=..."),
        ("E=8,N=14336", DEEPSEEK, (), "log of another model"),
        ("E=0,N=0", DEEPSEEK, (), "log of another model"),
    ],
)
def test_topk_of_a_file_follows_its_experts(
    tmp_path: Path, size: str, model: Path, more: tuple[str, ...], topk: int | str
) -> None:
    line = f"Config file not found at /x/{size},device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128].json"
    (tmp_path / "serve.log").write_text(line)
    done = from_log(tmp_path / "serve.log", "--model", model, "--m", "1", *more)
    if isinstance(topk, str):
        done.failed_with(2, topk)
    else:
        assert done.out.splitlines()[1].split(",")[4] == str(topk)
