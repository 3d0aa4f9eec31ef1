"""`gemmfleet publish` onto a checkout of vLLM: the branch, its text, and what is refused. The engine's look-up is asked
in this process; nothing here needs a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.configs import engine_tree
from orchestrator.errors import InputError
from orchestrator.publish.evidence import public_words
from tests.standins.aiter.checkout import checkout, commit, git, show
from tests.support.engine_runs import NEW, Times, engine_run, repository
from tests.support.engines import H200, ask_here, copy
from tests.support.marks import WITH_ENGINE
from worker.triton_configs.engine_package import EngineDevice, Layer

pytestmark = WITH_ENGINE

LINEAR = Layer("linear", 2112, 7168, dtype="fp8_w8a8", block=(128, 128))
SECOND = Layer("linear", 1536, 7168, dtype="fp8_w8a8", block=(128, 128))
MOE = Layer("moe", 256, 7168, 256, 8, "fp8_w8a8", (128, 128))
LINEAR_FILE = "vllm/model_executor/layers/quantization/utils/configs/N=2112,K=7168,device_name=NVIDIA_H200,"
LINEAR_FILE += "dtype=fp8_w8a8,block_shape=[128,128].json"
MOE_FILE = "vllm/model_executor/layers/fused_moe/configs/E=256,N=256,device_name=NVIDIA_H200,"
MOE_FILE += "dtype=fp8_w8a8,block_shape=[128,128].json"
OF_LINEAR: Times = {(64, ""): (20.0, 17.0), (96, ""): (20.0, 17.0), (512, ""): (30.0, None)}
OF_MOE: Times = {(8, "uniform"): (40.0, 30.0), (8, "zipf1"): (38.0, 30.4), (4096, "uniform"): (90.0, None)}
SCRIPT = "benchmarks/kernels/benchmark_moe.py"
BRANCH = "gemmfleet/some/model-vllm-configs"


@pytest.fixture(autouse=True)
def near(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_tree, "ask_engine", ask_here)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy("vllm", tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def vllm(tmp_path: Path, package: Path) -> Path:
    return repository(tmp_path / "vllm", package)


def publish(*words: object) -> dict[str, Any]:
    """The document of a publication, with the text of the pull request as `body`; a user's mistake raises."""
    done = CliRunner().invoke(app, ["publish", *map(str, words), "--model", "some/model", "--json"])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    document: dict[str, Any] = json.loads(done.stdout)
    return {**document, "body": Path(document["text"]).read_text()}


def test_the_branch_has_the_files_and_the_text_has_each_measured_m(tmp_path: Path, vllm: Path) -> None:
    commit(vllm, "a script", {SCRIPT: ""})
    (vllm / LINEAR_FILE).write_text("work of mine")
    linear = engine_run(tmp_path / "linear", LINEAR, H200, OF_LINEAR)
    moe = engine_run(tmp_path / "moe", MOE, H200, {**OF_MOE, (4096, "zipf1"): (95.0, None)})
    document = publish(linear, moe, "--onto", vllm)
    assert git(vllm, "diff", "--name-only", "main", BRANCH).split() == [MOE_FILE, LINEAR_FILE]
    assert (vllm / LINEAR_FILE).read_text() == "work of mine"
    assert git(vllm, "worktree", "list").count("\n") == 1
    assert NEW in json.loads(show(vllm, BRANCH, LINEAR_FILE)).values()
    assert document["files"] == {LINEAR_FILE: {"edited": 2, "kept": 1}, MOE_FILE: {"edited": 1, "kept": 1}}
    assert document["missing"] == []
    assert document["title"] == (
        "[Kernel][Perf] Tune block-FP8 linear and fused MoE configs of some/model on NVIDIA H200"
    )
    for line in (
        "| M | shipped (us) | tuned (us) | change |\n|--:|--:|--:|--:|\n| 64 | 20.00 | 17.00 | -15.0 % |\n",
        "| 512 | 30.00 | as before | |\n",
        "| 8 | 40.00 | 30.00 | -25.0 % | -25.0 % to -20.0 % |\n",
        "| GPU | NVIDIA H200 |\n| driver | 580.95 |", "| Triton | 3.6.0 |",
        "gemmfleet tune shapes.csv --tuner vllm",
        "# benchmarks/kernels/bench_block_fp8_gemm.py is not in the tree that this branch is based on",
        f"python3 {SCRIPT} --model some/model --tp-size TP --dtype fp8_w8a8 --trust-remote-code --batch-size 8 4096\n",
        "fp8_utils.py | the same file as measured with vllm 0.33.0 (sha256 ",
        "the look-up of vLLM 0.33.0 gives the expected config ", "| shipped | 64-96 | 2 |",
        "--num-prompts 768 --max-concurrency 96\n",
        "(1.005 x the time before + 0.5 us; no time below 4 us counts as slower)",
        "| A1 | base", "--linear-backend triton",
    ):  # fmt: skip
        assert line in document["body"], line
    assert f"# {SCRIPT} is not in the tree" not in document["body"]
    alone = publish(moe, "--onto", vllm, "--branch", "moe")
    assert list(alone["files"]) == [MOE_FILE]
    assert "linear" not in alone["body"]


@pytest.mark.parametrize("words", [["--onto", "."], ["--onto=."], ["--onto", "../vllm"]])
def test_the_text_names_the_checkout_and_no_folder_of_this_machine(
    tmp_path: Path, vllm: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    run = engine_run(tmp_path / "v0.3", MOE, H200, OF_MOE)
    monkeypatch.chdir(vllm)
    monkeypatch.setattr(sys, "argv", ["gemmfleet", "publish", "../v0.3", *words, "--model", "Qwen3.5"])
    shown = [word.replace("../vllm", ".").replace(".", "vllm") for word in words]
    document = publish(run, *words)
    assert f"gemmfleet publish ../v0.3 {' '.join(shown)} --model Qwen3.5\n" in document["body"]
    assert public_words(["publish", "/home/me/r1", "--out=/tmp/x y", "--e2e", "a /b"]) == [
        "publish", "r1", "--out=x y", "--e2e", "a /b"
    ]  # fmt: skip


def test_a_new_file_of_experts_names_its_triton_as_others_do(tmp_path: Path, vllm: Path) -> None:
    layer = Layer("moe", 648, 4096, 160, 8, "fp8_w8a8")
    document = publish(engine_run(tmp_path / "run", layer, H200, OF_LINEAR), "--onto", vllm)
    (file,) = document["files"]
    assert next(iter(json.loads(show(vllm, BRANCH, file)).items())) == ("triton_version", "3.6.0")
    assert "| M | default (us) | tuned (us) | change |" in document["body"]


def test_a_file_that_would_make_an_m_slower_is_left_out_with_its_reason(tmp_path: Path, vllm: Path) -> None:
    good, slower = (engine_run(tmp_path / f"{x.n}", x, H200, OF_LINEAR) for x in (LINEAR, SECOND))
    table = slower / "configs/vllm/tuned.csv"
    table.write_text(table.read_text().replace("20.0, 17.0", "20.0, 20.7"))
    results = tmp_path / "abba.md"
    results.write_text("| A1 | 1049.35 |\n")
    document = publish(good, slower, "--onto", vllm, "--e2e-results", results, "--e2e", "vllm bench serve x")
    assert list(document["files"]) == [LINEAR_FILE]
    (reason,) = (row["why"] for row in document["rows"] if row["outcome"] == "refused")
    assert "M=64 N=1536 K=7168 would become slower: 20 -> 20.7 us" in reason
    assert "- left out: " in document["body"]
    assert "Command, the same on both sides: `vllm bench serve x`\n\n| A1 | 1049.35 |\n" in document["body"]
    with pytest.raises(InputError, match=r"nothing to publish onto \w+\n.*would become slower"):
        publish(slower, "--onto", vllm, "--branch", "b2")
    with pytest.raises(InputError, match="in the tree already"):
        publish(good, "--onto", vllm, "--base", BRANCH, "--branch", "b2")
    assert "b2" not in git(vllm, "branch")


@pytest.mark.parametrize(
    ("sources", "words", "fault"),
    [
        (("run",), ("--onto", "aiter"), "aiter: is not a checkout of vLLM; the winners are for vLLM"),
        (("run",), ("--onto", "vllm", "--verify"), "an engine's own look-up is asked in any case"),
        (("run",), ("--onto", "vllm", "--family", "fmoe"), "--family: for AITER's tables"),
        (("run",), ("--onto", "vllm", "--e2e-results", "none.md"), "none.md: no such file"),
        (("run", "a8w8_tuned_gemm.csv"), ("--onto", "vllm"), r"run \(vLLM\), a8w8_tuned_gemm.csv \(AITER\)"),
        (("a8w8_tuned_gemm.csv",), ("--onto", "vllm"), "vllm: is not a checkout of AITER"),
    ],
)
def test_mistakes_name_the_way_out_and_leave_no_branch(
    tmp_path: Path, vllm: Path, monkeypatch: pytest.MonkeyPatch, sources: Any, words: Any, fault: str
) -> None:
    monkeypatch.chdir(tmp_path)
    engine_run(tmp_path / "run", LINEAR, H200, OF_LINEAR)
    (tmp_path / "a8w8_tuned_gemm.csv").write_text("gfx,cu_num,M,N,K,us\n")
    aiter = checkout(tmp_path / "aiter")
    with pytest.raises(InputError, match=fault):
        publish(*sources, *words)
    assert [git(folder, "branch") for folder in (vllm, aiter)] == ["* main\n", "* main\n"]


def test_sglang_gets_both_files_of_a_pair_and_the_sections_of_its_pull_requests(tmp_path: Path) -> None:
    sglang = repository(tmp_path / "sglang", copy("sglang", tmp_path / "wheel"))
    pair = {**NEW, "USE_TMA": True, **{f"down.{name}": value for name, value in NEW.items()}, "down.USE_TMA": True}
    pair.pop("down.BLOCK_SIZE_M")
    layer, device = Layer("moe", 1792, 2048, 32, 4), EngineDevice("NVIDIA H200", 90, "3.6.0")
    run = engine_run(tmp_path / "run", layer, device, OF_LINEAR, project="sglang", new=pair)
    document = publish(run, "--onto", sglang)
    up_file, down_file = (file.rpartition("configs/")[2] for file in document["files"])
    assert up_file == "triton_3_6_0/E=32,N=1792,device_name=NVIDIA_H200.json"
    assert down_file == up_file.replace(".json", "_down.json")
    assert [row["M"] for row in document["rows"]] == [64, 96, 512]
    for line in ("## Modifications\n\n- `sglang/srt", "| M | default (us) |", "python3 -m sglang.bench_serving"):
        assert line in document["body"], line
    assert document["body"].count("| 64 | 20.00 | 17.00 | -15.0 % |") == 1, "one table for both files"
