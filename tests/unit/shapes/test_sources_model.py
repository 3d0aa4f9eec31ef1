"""`shapes from-model`: published models give the shapes that are known of them.

tests/data/models holds the values that matter of the config.json files that the makers publish on Hugging Face:
meta-llama/Meta-Llama-3-8B, Meta-Llama-3-70B, Llama-3.1-405B; Qwen/Qwen3-235B-A22B; deepseek-ai/DeepSeek-V3;
openai/gpt-oss-120b. "AITER ships" means the untuned lists in aiter/configs/model_configs at e4048607a5 (2026-08-22).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.errors import InputError
from orchestrator.families import get_family
from orchestrator.shapes.from_model import ModelShapes, Ranks, model_shapes
from orchestrator.shapes.model_config import read_model
from orchestrator.shapes.reader import read_shapes
from tests.paths import TEST_DATA
from tests.support.model_classes import ask_here

pytestmark = pytest.mark.usefixtures("classes_here")
MODELS = TEST_DATA / "models"


def shapes(config: str | Path, family: str, tp: int = 1, *, as_16_bits: bool = False, **kw: Any) -> ModelShapes:
    """The shapes of a model by its name here, or of a config.json; more words are those of Ranks and model_shapes."""
    file = config if isinstance(config, Path) else MODELS / f"{config}.json"
    ranks = Ranks(tp, **{name: kw.pop(name) for name in ("ep", "fuse_shared") if name in kw})
    model = read_model(file, quantised=not as_16_bits, ask=ask_here)
    return model_shapes(model, get_family(family), kw.pop("ms", [1]), ranks, **kw)


def gemms(name: str | Path, tp: int, family: str = "a8w8", **kw: Any) -> set[tuple[int, int]]:
    """(N, K) of a model's GEMMs, as if it had 16 bits."""
    at = get_family(family).key_names.index("N")
    return {(int(k[at]), int(k[at + 1])) for k in shapes(name, family, tp, **{"as_16_bits": True, **kw}).keys}


# fmt: off
KNOWN = [
    # model, tp, {(N, K)}: without lm_head and router, which stay unquantised
    # AITER ships these for llama70B at tp 8
    ("llama-3-70b", 8, {(1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584)}),
    # and these for llama405B at tp 8
    ("llama-3.1-405b", 8, {(2304, 16384), (16384, 2048), (13312, 16384), (16384, 6656)}),
    # AITER ships these at tp 8; with 8 ranks and 4 key-value heads each rank has a copy of one
    ("qwen3-235b-a22b", 8, {(1280, 4096), (4096, 1024)}),
    # AITER ships 2112x7168, 3072x1536, 4096x512, 7168x2048 and 512x7168 at tp 8
    ("deepseek-v3", 8, {
        (1536, 7168), (576, 7168), (2112, 7168), (3072, 1536), (4096, 512), (7168, 2048),  # attention
        (4608, 7168), (7168, 2304),  # the three dense layers
        (512, 7168), (7168, 256),  # the shared expert
    }),
    # AITER ships these at tp 8
    ("gpt-oss-120b", 8, {(640, 2880), (2880, 512)}),
]
# fmt: on


@pytest.mark.parametrize(("name", "tp", "known"), KNOWN, ids=lambda v: str(v) if isinstance(v, (str, int)) else "")
def test_published_models(name: str, tp: int, known: set[tuple[int, int]]) -> None:
    assert gemms(name, tp) == known


def test_unquantised_gemms_types_and_bias_follow_the_model() -> None:
    more = gemms("deepseek-v3", 8, "a16w16") - gemms("deepseek-v3", 8)
    assert more == {(16160, 7168), (256, 7168)}  # lm_head and router, as AITER ships for dsv3_bf16
    assert gemms("deepseek-v3", 8, "a16w16", as_16_bits=False) == more
    assert gemms("deepseek-v3", 8, "a8w8_blockscale", as_16_bits=False) == gemms("deepseek-v3", 8)
    assert gemms("deepseek-v3", 8, "a8w8", only=["lm_head"]) == {(16160, 7168)}
    of = get_family("a16w16")
    found = shapes("gpt-oss-120b", "a16w16", 8, ms=[7])
    rows = {(k[1], k[2]): dict(zip(of.key_names, k, strict=True)) for k in found.keys}
    biased = {nk: r["bias"] for nk, r in rows.items()}  # attention, the router, lm_head
    assert biased == {(640, 2880): "True", (2880, 512): "True", (128, 2880): "True", (25136, 2880): "False"}
    assert {(r["M"], r["dtype"], r["outdtype"]) for r in rows.values()} == {(7, "torch.bfloat16", "torch.bfloat16")}
    absorbed = shapes("deepseek-v3", "batched_bf16", 8, ms=[4])
    assert absorbed.calls == {(16, 4, 512, 128): 61, (16, 4, 128, 512): 61}


def test_experts() -> None:
    def row(name: str, **kw: Any) -> str:
        return ",".join(map(str, shapes(name, "fmoe", **kw).keys[0]))

    fp8 = "torch.float8_e4m3fn"
    # as AITER ships: a8w8_blockscale_untuned_fmoe_ds_v3.csv
    assert row("deepseek-v3", tp=8, fuse_shared=True) == (
        f"1,7168,256,257,9,ActivationType.Silu,torch.bfloat16,{fp8},{fp8},QuantType.per_1x128,1,0"
    )
    assert row("deepseek-v3", tp=8).startswith("1,7168,256,256,8,")
    # as AITER ships: a8w8_blockscale_untuned_fmoe_qwen3_235b.csv, experts over 8 ranks
    quant = {"q_dtype_a": fp8, "q_dtype_w": fp8, "q_type": "QuantType.per_1x128"}
    assert row("qwen3-235b-a22b", tp=8, ep=8, columns=quant) == (
        f"1,4096,1536,16,8,ActivationType.Silu,torch.bfloat16,{fp8},{fp8},QuantType.per_1x128,1,0"
    )
    assert row("qwen3-235b-a22b", tp=4).startswith("1,4096,384,128,8,ActivationType.Silu,torch.bfloat16,torch.bfloat16")
    # gptoss_a16w4_untuned_fmoe.csv but for the padding to 3072, of which a note tells
    assert row("gpt-oss-120b") == (
        "1,2880,2880,128,4,ActivationType.Swiglu,torch.bfloat16,torch.bfloat16,torch.float4_e2m1fn_x2,QuantType.per_1x32,1,0"
    )
    assert any("256" in note for note in shapes("gpt-oss-120b", "fmoe").notes)


def changed(folder: Path, name: str = "llama-3-8b", **change: Any) -> Path:
    """The config of a model with other values, None for a key that is not there."""
    raw = {**json.loads((MODELS / f"{name}.json").read_text()), **change}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))
    return folder / "config.json"


def test_direct_q_and_language_model_within_another(tmp_path: Path) -> None:
    inner = json.loads(changed(tmp_path, "deepseek-v3", q_lora_rank=None).read_text())  # as in DeepSeek-V2-Lite
    inner["q_lora_rank"] = None
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "some_vl", "text_config": inner}))
    names = dict(shapes(tmp_path, "a8w8", 8, as_16_bits=True).layers)  # the folder will do
    assert names["q"] == "N 3072, K 7168, 61 times"
    assert not names.keys() & {"q_a", "q_b", "q_kv_a"}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"hidden_size": None}, "needs hidden_size"),
        ({"hidden_size": "4096"}, "Field 'hidden_size' expected int, got str"),
        ({"hidden_act": "situ"}, "does not know 'situ', which the config has as hidden_act"),
        ({"rope_parameters": {"rope_type": "foo", "rope_theta": 1.0}}, "'foo', which the config has as rope_type"),
        ({"num_attention_heads": 33}, "not a multiple of the number of attention heads (33)"),
        ({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 9}, "9 is more than the 4 experts"),
        ("[1]", "no JSON object"), ("{", "is no JSON"), ("[" * 100_000, "is no JSON"),
        ("9" * 100_000, "is no JSON"),
    ],
    ids=range(10),
)  # fmt: skip
def test_faults_of_a_config(tmp_path: Path, change: dict[str, Any] | str, told: str) -> None:
    file = changed(tmp_path, **(change if isinstance(change, dict) else {}))
    if isinstance(change, str):
        file.write_text(change)
    with pytest.raises(InputError, match=r"config\.json") as e:
        read_model(file, ask=ask_here)
    assert told in str(e.value)


@pytest.mark.parametrize(
    ("name", "change", "family", "tp", "told"),
    [
        ("llama-3-70b", {}, "a8w8", 3, "64 attention heads"),
        ("llama-3-70b", {"intermediate_size": 96}, "a8w8", 64, "does not divide the width 96 of mlp.gate_proj"),
        (
            "llama-3-70b",
            {"hidden_size": 6144, "num_attention_heads": 48, "num_key_value_heads": 12},
            "a8w8",
            8,
            "neither",
        ),
        ("llama-3-8b", {}, "batched_bf16", 1, "has no batched GEMMs"),
        ("llama-3-8b", {}, "fmoe", 1, "has no experts"),
        ("deepseek-v3", {}, "batched_gemm_a8w8_blockscale_mxscale", 1, "take its shapes from a log"),
    ],
)
def test_what_does_not_fit(tmp_path: Path, name: str, change: dict[str, Any], family: str, tp: int, told: str) -> None:
    with pytest.raises(InputError, match=told):
        shapes(changed(tmp_path, name, **change), family, tp, as_16_bits=True)


def test_k_that_no_kernel_can_take_is_left_out_with_a_word(tmp_path: Path) -> None:
    found = shapes(changed(tmp_path, intermediate_size=14336 + 16), "a4w4_blockscale")
    assert all(int(k[2]) % 32 == 0 for k in found.keys)
    assert any(n.startswith("left out down: K is not a multiple of 32") for n in found.notes)


@pytest.mark.parametrize(("family", "padded"), [("a8w8_blockscale", 3), ("fmoe", 1), ("batched_bf16", 1)])
def test_the_command_writes_what_tune_reads(tmp_path: Path, family: str, padded: int) -> None:
    """`padded`: shapes that become one point of the grid."""
    out = tmp_path / "out.csv"
    args = ["shapes", "from-model", str(MODELS / "deepseek-v3.json"), "--tp", "8", "--m", "1,5,16", "--family", family]
    result = CliRunner().invoke(app, [*args, "-o", str(out)])
    assert result.exit_code == 0, (result.output, result.exception)
    listed = read_shapes(out, get_family(family))
    assert f"{len(listed.shapes)} shapes of family {family} for one rank of 8" in result.stdout
    assert "is there already" in str(CliRunner().invoke(app, [*args, "-o", str(out)]).exception)
    found = json.loads(CliRunner().invoke(app, [*args, "-o", str(out), "--force", "--pad-m", "--json"]).stdout)
    assert padded * len(read_shapes(out, get_family(family)).shapes) == padded * found["shapes"] == len(listed.shapes)


def test_the_command_on_standard_output_and_bad_words(tmp_path: Path) -> None:
    base = ["shapes", "from-model", str(MODELS / "llama-3-8b.json"), "--m", "1"]
    good = CliRunner().invoke(app, [*base, "--family", "a8w8", "--layers", "o", "--set", "q_dtype_w=torch.int8"])
    assert good.stdout.splitlines()[0] == "M,N,K,q_dtype_w,count,transformers"
    assert good.stdout.splitlines()[1].startswith("1,4096,4096,torch.int8,32,5.")
    assert "1 shape of family a8w8" in good.stderr
    for more, told in (
        (["--set", "x=1"], "cannot be set"),
        (["--set", "bias"], "write COLUMN=VALUE"),
        (["--layers", "okv"], "did you mean"),
        (["--json"], "needs -o"),
        (["--m", "1,,2"], "--m"),
        (["--family", "a4"], "did you mean a4w4_blockscale"),
    ):
        bad = CliRunner().invoke(app, [*base, *more])
        assert isinstance(bad.exception, InputError), more
        assert told in str(bad.exception), bad.exception
