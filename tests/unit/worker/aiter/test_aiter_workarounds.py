"""Workarounds act on a scratch copy, with hashes, where their predicate holds and nowhere else."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import aitertree
from tests.support.aitertree import SCRIPT, make
from worker.aiter_tree.scratch import ScratchTree
from worker.families import FAMILIES
from worker.tuners.aiter import workarounds
from worker.tuners.aiter.findings import inspect
from worker.tuners.aiter.workarounds import WorkaroundRefusedError, apply, needed, prepare

A4W4 = "a4w4_blockscale"
UNTRIMMED = aitertree.QUANTISER.replace("[:M, :scaleN_valid]", "[:M]")
OLD_NAMES = aitertree.A4W4.replace('"tile_M", "tile_N"', "'tile_m', \"tile_n\"")
ODD, EVEN = {"M": 64, "N": 256, "K": 384}, {"M": 64, "N": 256, "K": 512}


def state(root: Path) -> dict[str, str]:
    """Every file and link below a folder with what is in it."""
    return {
        str(p.relative_to(root)): f"-> {p.readlink()}" if p.is_symlink() else hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(root.rglob("*"))
        if p.is_symlink() or p.is_file()
    }


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("asm_dir_symlink", {"core": aitertree.PLAIN_CORE}),
        ("tile_column_case", {"script": OLD_NAMES}),
        ("k_trim", {"quantiser": UNTRIMMED}),
    ],
)
def test_needed_and_applied(tmp_path: Path, name: str, changes: dict[str, str]) -> None:
    root = make(tmp_path / "real", **changes)
    before = state(root)
    found = inspect(root)
    assert found.workarounds[name].verdict == "needed"
    scratch = ScratchTree.make(found.tree, tmp_path / "scratch")
    fresh = inspect(scratch.tree)
    assert fresh.workarounds[name].verdict == "needed"
    applied = apply(name, found, scratch)
    assert inspect(scratch.tree).workarounds[name].verdict != "needed"
    told = json.loads(json.dumps(applied))
    assert told["name"] == name
    assert "ROCm/aiter" in told["source"]
    assert told["evidence"]
    for entry in told["files"]:
        assert entry["sha256_before"] != entry["sha256_after"]
        if entry["file"] in before:
            assert entry["sha256_before"] == before[entry["file"]]
    assert state(root) == before


def test_harmful_and_needless_ones_are_refused_with_the_reason(tmp_path: Path) -> None:
    found = inspect(make(tmp_path / "real"))
    scratch = ScratchTree.make(found.tree, tmp_path / "scratch")
    before = state(tmp_path / "scratch")
    with pytest.raises(WorkaroundRefusedError, match=r"would do harm here: .*tile_M,tile_N"):
        apply("tile_column_case", found, scratch)
    for name in ("asm_dir_symlink", "k_trim"):
        with pytest.raises(WorkaroundRefusedError, match="not needed here"):
            apply(name, found, scratch)
    assert state(tmp_path / "scratch") == before


def test_a_link_made_by_hand_for_one_family_is_not_enough(tmp_path: Path) -> None:
    root = make(tmp_path / "real", core=aitertree.PLAIN_CORE)
    (root / "hsa/f4gemm").symlink_to("gfx950/f4gemm")
    assert inspect(root).workarounds["asm_dir_symlink"].verdict == "harmless"
    (root / "hsa/gfx950/i8gemm").mkdir()
    (root / "hsa/gfx950/i8gemm/list.csv").write_text("tile_m\n")
    found = inspect(root)
    assert found.workarounds["asm_dir_symlink"].verdict == "needed"
    scratch, applied = prepare(found, FAMILIES["a8w8_bpreshuffle"], [], tmp_path / "scratch")
    assert scratch is not None
    assert [f["file"] for a in applied for f in a["files"]] == ["hsa/i8gemm"]
    assert (scratch.folder / "hsa/i8gemm/list.csv").is_file()
    assert (scratch.folder / "hsa/f4gemm/f4gemm_bf16_per1x32Fp4.csv").is_file()


def test_two_in_one_file(tmp_path: Path) -> None:
    root = make(tmp_path / "real", script=OLD_NAMES, quantiser=UNTRIMMED)
    before = state(root)
    scratch, applied = prepare(inspect(root), FAMILIES[A4W4], [ODD], tmp_path / "scratch")
    assert scratch is not None
    assert [a["name"] for a in applied] == ["tile_column_case", "k_trim"]
    assert applied[1]["files"][0]["sha256_before"] == applied[0]["files"][0]["sha256_after"]
    text = scratch.tree.scripts[A4W4].read_text()
    assert "['tile_M', \"tile_N\"]" in text
    assert "tile_m, tile_n = first" in text  # a variable's name is nobody's business
    assert "x_f32 = x_f32 * x_scales_f32[..., : x_f32.shape[-1]]" in text
    assert state(root) == before


def test_what_is_needed_depends_on_family_and_shapes(tmp_path: Path) -> None:
    found = inspect(make(tmp_path, core=aitertree.PLAIN_CORE, script=OLD_NAMES, quantiser=UNTRIMMED))
    assert needed(found, FAMILIES[A4W4], [EVEN]) == ["asm_dir_symlink", "tile_column_case"]
    assert needed(found, FAMILIES[A4W4], [EVEN, ODD]) == ["asm_dir_symlink", "tile_column_case", "k_trim"]
    assert needed(found, FAMILIES["a8w8_bpreshuffle"], [ODD]) == ["asm_dir_symlink"]
    today = inspect(make(tmp_path / "today"))
    assert prepare(today, FAMILIES[A4W4], [ODD], tmp_path / "none") == (None, ())
    assert not (tmp_path / "none").exists()


def test_one_that_mends_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = inspect(make(tmp_path / "real", quantiser=UNTRIMMED))
    scratch = ScratchTree.make(found.tree, tmp_path / "scratch")
    idle = replace(
        workarounds.WORKAROUNDS["k_trim"], fix=lambda _, gfx, s: [(SCRIPT, s.tree.scripts[A4W4].read_bytes() + b"#\n")]
    )
    monkeypatch.setitem(workarounds.WORKAROUNDS, "k_trim", idle)
    with pytest.raises(WorkaroundRefusedError, match="mended nothing"):
        apply("k_trim", found, scratch)


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    found = inspect(make(tmp_path / "real"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/data").write_text("dear")
    with pytest.raises(FileExistsError):
        ScratchTree.make(found.tree, tmp_path / "mine")
    ScratchTree.make(found.tree, tmp_path / "scratch")
    assert ScratchTree.make(found.tree, tmp_path / "scratch").tree.package.is_dir()  # an older copy is replaced
    assert (tmp_path / "real/aiter/jit/core.py").is_file()


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    found = inspect(make(tmp_path / "real"))
    scratch = ScratchTree.make(found.tree, tmp_path / "scratch")
    before = state(tmp_path / "real")
    scratch.write("aiter/jit/core.py", b"changed\n")
    scratch.write("hsa/gfx950/f4gemm/f4gemm_bf16_per1x32Fp4.csv", b"changed\n")
    with pytest.raises(OSError, match="behind a link"):
        scratch.write("aiter/../../real/aiter/__init__.py", b"changed\n")
    assert state(tmp_path / "real") == before
    assert (scratch.folder / "aiter/jit/core.py").read_text() == "changed\n"
