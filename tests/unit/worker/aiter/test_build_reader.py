"""Kernels of a tree of AITER: lists read by a child process that is held in check, three answers a row."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from orchestrator.errors import InputError
from orchestrator.families import get_family
from orchestrator.tables.check import Build
from orchestrator.tables.tuned import key_of
from tests.support.aiterbuild import ASM, CK, CK2, tree
from tests.unit.tables.test_db_export import table
from worker.aiter_tree import kernel_lists

A4W4 = "a4w4_blockscale"


def answer(build: Build, family: str, **cells: str) -> str:
    row = {"gfx": "gfx950", "cu_num": "256", "M": "1", "N": "64", "K": "64", "q_dtype_w": "torch.int8", **cells}
    return build.answer(get_family(family), key_of(row, get_family(family)), row).standing


def why(build: Build, family: str, **cells: str) -> str:
    row = {"gfx": "gfx950", "cu_num": "256", "M": "1", "N": "64", "K": "64", "q_dtype_w": "torch.int8", **cells}
    return build.answer(get_family(family), key_of(row, get_family(family)), row).why


def test_three_answers(tmp_path: Path) -> None:
    root = tree(tmp_path)
    table(root / "aiter" / "configs" / "a4w4_blockscale_tuned_gemm.csv", {"M": 7, "kernelName": CK})
    build = Build(root)
    assert answer(build, A4W4, kernelName=ASM) == "loads"
    assert answer(build, A4W4, kernelName=CK) == "loads"  # the registry is by name: any shape has it
    assert answer(build, A4W4, kernelName=CK2) == "rebuild"
    assert answer(build, A4W4, kernelName="a4w4_blockscale_1x1_v3") == "cannot"  # of the defaults, no candidate
    assert answer(build, A4W4, kernelName=ASM + "x") == "cannot"
    assert answer(build, A4W4, kernelName="torch_lut256_t2") == "cannot"
    assert "gemmfleet's tuner torch" in why(build, A4W4, kernelName="torch_lut256_t2")
    assert "stops with an error" in why(build, A4W4, kernelName="a4w4_blockscale_9x9_v3")


def test_where_a_shape_is_compiled_the_number_counts(tmp_path: Path) -> None:
    root = tree(tmp_path, by_name=False, strict=False)
    table(root / "aiter" / "configs" / "a4w4_blockscale_tuned_gemm.csv", {"M": 7, "kernelName": CK})
    build = Build(root)
    assert answer(build, A4W4, M="7", kernelName=CK, kernelId="0") == "loads"
    assert answer(build, A4W4, M="8", kernelName=CK, kernelId="0") == "rebuild"
    assert answer(build, A4W4, kernelName=CK, kernelId="1") == "cannot"
    assert f"is {CK2}" in why(build, A4W4, kernelName=CK, kernelId="1")
    assert "stops" not in why(build, A4W4, kernelName="a4w4_blockscale_9x9_v3", kernelId="0")


OPUS_LIST = """
from dataclasses import dataclass

@dataclass
class Instance:
    B_M: int
    preload: bool = False
    @property
    def name(self):
        return "opus_bmm_a8w8_mxscale_" + str(self.B_M) + ("_preload" if self.preload else "")

def tile(bm, **flags):
    inst = Instance(bm)
    for key, val in flags.items():
        setattr(inst, key, val)
    return inst

small = {32: tile(32), 64: tile(64)}
large = {158: tile(256, preload=True)}
a8w8_mxscale_bmm_kernel_lists = (small, large)
a16w16_kernels_list = {32: tile(999)}
"""


def test_a_list_that_is_compiled_as_a_whole_is_called_by_number(tmp_path: Path) -> None:
    """opus numbers its batched products by themselves: 32 is another kernel of bf16."""
    root = tree(tmp_path)
    operator = "def _batched_gemm_a8w8_mxscale_impl(libtype):\n    return libtype != 'opus'\n"
    files = {"csrc/opus_gemm/opus_gemm_common.py": OPUS_LIST, "aiter/ops/batched_gemm_op_a8w8.py": operator}
    files["aiter/ops/opus/__init__.py"] = ""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    build, family = Build(root), "batched_gemm_a8w8_blockscale_mxscale"
    row = {"B": "2", "N": "128", "K": "128", "libtype": "opus"}
    assert answer(build, family, **row, kernelId="32", kernelName="opus_bmm_a8w8_mxscale_32") == "loads"
    assert answer(build, family, **row, kernelId="158", kernelName="opus_bmm_a8w8_mxscale_256_preload") == "loads"
    wrong = {**row, "kernelId": "32", "kernelName": "opus_bmm_a8w8_mxscale_999"}
    assert why(build, family, **wrong) == "AITER calls the kernel of kernelId 32 here: opus_bmm_a8w8_mxscale_32"
    assert "kernelId 7 here: none" in why(build, family, **{**wrong, "kernelId": "7"})
    assert "knows no libtype flydsl" in why(build, family, **{**wrong, "libtype": "flydsl"})
    assert not build.problems


@pytest.mark.parametrize("data", [b"\0" + CK2.encode() + b"\0", b"_Z%d" % len(CK2) + CK2.encode() + b"IN2ck"])
def test_names_in_built_modules_are_what_is_built(tmp_path: Path, data: bytes) -> None:
    root = tree(tmp_path, built={"module_gemm_a4w4_blockscale": data})
    table(root / "aiter" / "configs" / "a4w4_blockscale_tuned_gemm.csv", {"M": 7, "kernelName": CK})
    build = Build(root)
    assert answer(build, A4W4, kernelName=CK2) == "loads"
    assert answer(build, A4W4, kernelName=CK) == "rebuild"  # the table came after the module
    stripped = Build(tree(tmp_path / "stripped", built={"module_gemm_a4w4_blockscale": b"\0nothing\0"}))
    assert answer(stripped, A4W4, kernelName=CK) == "rebuild"


def test_lists_that_depend_on_the_chip(tmp_path: Path) -> None:
    build = Build(tree(tmp_path))
    name = "a8w8_blockscale_cktile_192_p2"
    assert answer(build, "a8w8_blockscale", libtype="cktile", kernelName=name) == "rebuild"
    assert answer(build, "a8w8_blockscale", libtype="cktile", kernelName=name, gfx="gfx942") == "cannot"
    assert answer(build, "a8w8_blockscale", libtype="cktile", kernelName="a8w8_blockscale_cktile_64", gfx="gfx942") == (
        "rebuild"
    )


def test_libtypes_and_names_that_the_operator_reads(tmp_path: Path) -> None:
    build = Build(tree(tmp_path))
    (tmp_path / "aiter" / "ops" / "flydsl").mkdir()
    assert answer(build, "a8w8_blockscale", libtype="opus", kernelName="opus_gemm_x") == "cannot"
    assert "knows no libtype opus (ck, cktile)" in why(build, "a8w8_blockscale", libtype="opus", kernelName="opus_x")
    assert answer(build, "a8w8_bpreshuffle", libtype="flydsl", kernelName="flydsl_bpre_1x2") == "loads"
    assert answer(build, "a8w8_bpreshuffle", libtype="flydsl", kernelName="flydsl_bpre_1x2x3") == "cannot"


def test_code_objects_that_are_missing(tmp_path: Path) -> None:
    root = tree(tmp_path, asm=(ASM, ASM + "2"))
    (root / "hsa" / "gfx950" / "f4gemm" / f"{ASM}.co").touch()
    build = Build(root)
    assert [answer(build, A4W4, kernelName=n) for n in (ASM, ASM + "2")] == ["loads", "cannot"]


LIST = "csrc/ck_gemm_a4w4_blockscale/gemm_a4w4_blockscale_common.py"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kernels_list = load()\n", "cannot be imported: NameError"),
        ("kernels_list = {}\n", "holds no list of kernels"),
        ("x = bytearray(3 << 30)\n", "cannot be imported: MemoryError"),
        ("import os\nos._exit(3)\n", "ended with status 3"),
        ("while True:\n    pass\n", "were not read within 1 s"),
        ("import subprocess\nsubprocess.run(['sleep', '600'])\n", "were not read within 1 s"),
    ],
)
def test_a_list_that_cannot_be_read_is_no_green(
    tmp_path: Path, text: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "within 1 s" in words:
        monkeypatch.setattr(kernel_lists, "SECONDS", 1)
    root = tree(tmp_path)
    (root / LIST).write_text(text)
    build = Build(root)
    assert answer(build, A4W4, kernelName=CK) == "unread"
    assert any(words in p for p in build.problems), build.problems


def test_the_child_gets_nothing_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No secret in its environment, an empty home, none of our packages; AITER's own package never runs."""
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    root = tree(tmp_path / "tree")
    (root / "aiter/__init__.py").write_text("raise SystemExit('it ran')\n")
    seen = tmp_path / "seen.json"
    spy = (
        "import json, os, sys\nimport torch, aiter.jit.core\nfrom aiter.ops.shuffle import shuffle_weight\n"
        f"open({str(seen)!r}, 'w').write(json.dumps([dict(os.environ), os.listdir(os.environ['HOME']), sys.path, "
        "sorted(m for m in sys.modules if m.startswith(('worker', 'orchestrator', 'numpy')))]))\n"
        "print('{}')\n"
    )
    (root / LIST).write_text(spy + (root / LIST).read_text())
    build = Build(root)
    assert answer(build, A4W4, kernelName=CK) == "rebuild"
    env, home, path, modules = json.loads(seen.read_text())
    assert set(env) <= {"PATH", "HOME", "TMPDIR", "LC_ALL"}
    assert home == ["answer"]
    assert not any("site-packages" in p or os.path.exists(f"{p}/worker") for p in path)
    assert modules == []
    assert not os.path.exists(env["HOME"])


def test_a_folder_without_aiter_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no AITER tree is there"):
        Build(tmp_path)
