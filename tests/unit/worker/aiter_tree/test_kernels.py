"""Kernels of a tree of AITER: lists read by a child process that is held in check, three answers a row."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from orchestrator.families import get_family
from orchestrator.tables.aiter_build import Build
from orchestrator.tables.keys import key_of
from tests.standins.aiter.kernel_lists import ASM, CK, CK2, tree
from tests.support.files import write_files
from tests.support.tuned_tables import A4W4 as FAMILY
from tests.support.tuned_tables import line, text
from worker.aiter_tree import kernel_lists
from worker.aiter_tree.kernels import KernelAvailability
from worker.foreign.runner import KEPT_VARIABLES, Limits

A4W4, TILE, BPRE = "a4w4_blockscale", "a8w8_blockscale", "a8w8_bpreshuffle"
BMM = "batched_gemm_a8w8_blockscale_mxscale"
LIST = "csrc/ck_gemm_a4w4_blockscale/gemm_a4w4_blockscale_common.py"


def answer(build: Build, family: str, **cells: str) -> KernelAvailability:
    row = {"gfx": "gfx950", "cu_num": "256", "M": "1", "N": "64", "K": "64", "q_dtype_w": "torch.int8", **cells}
    return build.availability_of(get_family(family), key_of(row, get_family(family)), row)


def compiled(root: Path) -> Path:
    """The tree with a table of one row, from which its module is compiled."""
    table = text(FAMILY, line(FAMILY, M=7, kernelName=CK, kernelId=0))
    return write_files(root, {"aiter/configs/a4w4_blockscale_tuned_gemm.csv": table})


ROWS = [
    (A4W4, {"kernelName": ASM}, "loads", ""),
    (A4W4, {"kernelName": CK}, "loads", ""),  # the registry is by name: any shape has it
    (A4W4, {"kernelName": CK2}, "rebuild", ""),
    (A4W4, {"kernelName": "a4w4_blockscale_1x1_v3"}, "cannot", "stops with an error"),  # of the defaults, no candidate
    (A4W4, {"kernelName": ASM + "x"}, "cannot", "no list of hsa/gfx950/f4gemm has an ASM kernel"),
    (A4W4, {"kernelName": "torch_lut256_t2"}, "cannot", "gemmfleet's tuner torch"),
    (TILE, {"libtype": "cktile", "kernelName": "a8w8_blockscale_cktile_192_p2"}, "rebuild", ""),
    (TILE, {"libtype": "cktile", "kernelName": "a8w8_blockscale_cktile_192_p2", "gfx": "gfx942"}, "cannot", ""),
    (TILE, {"libtype": "cktile", "kernelName": "a8w8_blockscale_cktile_64", "gfx": "gfx942"}, "rebuild", ""),
    (TILE, {"libtype": "opus", "kernelName": "opus_gemm_x"}, "cannot", "knows no libtype opus (ck, cktile)"),
    (BPRE, {"libtype": "flydsl", "kernelName": "flydsl_bpre_1x2"}, "loads", ""),
    (BPRE, {"libtype": "flydsl", "kernelName": "flydsl_bpre_1x2x3"}, "cannot", "no FlyDSL kernel"),
]


def test_three_answers(tmp_path: Path) -> None:
    build = Build(compiled(tree(tmp_path)))
    (tmp_path / "aiter/ops/flydsl").mkdir()
    for family, cells, standing, words in ROWS:
        found = answer(build, family, **cells)
        assert (found.standing, words in found.why) == (standing, True), (cells, found)
    assert not build.problems


def test_where_a_shape_is_compiled_the_number_counts(tmp_path: Path) -> None:
    build = Build(compiled(tree(tmp_path, by_name=False, strict=False)))
    assert answer(build, A4W4, M="7", N="64", K="128", kernelName=CK, kernelId="0").standing == "loads"
    assert answer(build, A4W4, M="8", N="64", K="128", kernelName=CK, kernelId="0").standing == "rebuild"
    other = answer(build, A4W4, kernelName=CK, kernelId="1")
    assert (other.standing, f"is {CK2}" in other.why) == ("cannot", True)
    assert "stops" not in answer(build, A4W4, kernelName="a4w4_blockscale_9x9_v3", kernelId="0").why


@pytest.mark.parametrize("data", [b"\0" + CK2.encode() + b"\0", b"_Z%d" % len(CK2) + CK2.encode() + b"IN2ck", b"\0x\0"])
def test_names_in_built_modules_are_what_is_built(tmp_path: Path, data: bytes) -> None:
    """A module without any name (stripped) says nothing; then the table does."""
    build = Build(compiled(tree(tmp_path, built={"module_gemm_a4w4_blockscale": data})))
    named = CK2.encode() in data
    assert answer(build, A4W4, kernelName=CK2).standing == ("loads" if named else "rebuild")
    assert answer(build, A4W4, kernelName=CK).standing == ("rebuild" if named else "loads")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("kernels_list = load()\n", "cannot be imported: NameError"),
        ("kernels_list = {}\n", "holds no list of kernels"),
        ("x = bytearray(3 << 30)\n", "cannot be imported: MemoryError"),
        ("import os\nos._exit(3)\n", "ended with status 3"),
        ("import subprocess\nsubprocess.run(['sleep', '600'])\n", "was not done within 1 s"),
    ],
)
def test_a_list_that_cannot_be_read_is_no_green(
    tmp_path: Path, content: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "within 1 s" in words:
        monkeypatch.setattr(kernel_lists, "LIMITS", Limits(seconds=1))
    root = tree(tmp_path)
    (root / LIST).write_text(content)
    build = Build(root)
    assert answer(build, A4W4, kernelName=CK).standing == "unread"
    assert any(words in p for p in build.problems), build.problems


def test_the_child_gets_nothing_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No secret in its environment, an empty home, none of our packages; AITER's own package never runs."""
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    root = tree(tmp_path / "tree")
    (root / "aiter/__init__.py").write_text("raise SystemExit('it ran')\n")
    seen = tmp_path / "seen.json"
    spy = (
        "import json, os, sys\nimport torch, aiter.jit.core\nfrom aiter.ops.shuffle import shuffle_weight\n"
        f"open({str(seen)!r}, 'w').write(json.dumps([dict(os.environ), os.listdir(os.environ['HOME']), "
        "sorted(m for m in sys.modules if m.startswith(('orchestrator', 'numpy')))]))\n"
        "print('{}')\n"
    )
    (root / LIST).write_text(spy + (root / LIST).read_text())
    assert answer(Build(root), A4W4, kernelName=CK).standing == "rebuild"
    env, home, modules = json.loads(seen.read_text())
    assert set(env) <= {*KEPT_VARIABLES, "HOME", "TMPDIR", "PYTHONDONTWRITEBYTECODE"}
    assert (home, modules) == ([], [])
    assert not os.path.exists(env["HOME"])
