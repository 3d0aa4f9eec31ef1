"""Workarounds act on a scratch copy, with hashes, where their predicate holds and nowhere else."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests.standins.aiter import change, make_tree
from worker.aiter_tree.scratch_tree import ScratchTree
from worker.families import FAMILIES
from worker.tuners.aiter.findings import inspect
from worker.tuners.aiter.workarounds import apply_workarounds, needed_workarounds

A4W4 = FAMILIES["a4w4_blockscale"]
SCRIPT = "csrc/ck_gemm_a4w4_blockscale/gemm_a4w4_blockscale_tune.py"
LIST = "hsa/gfx950/f4gemm/f4gemm_bf16_per1x32Fp4.csv"
PLAIN_CORE = ("aiter/jit/core.py", "os.path.join(AITER_ASM_DIR, get_gfx())", "AITER_ASM_DIR")
OLD_NAMES = (SCRIPT, '"tile_M", "tile_N"', "'tile_m', \"tile_n\"")
UNTRIMMED = ("aiter/utility/fp4_utils.py", "[:scaleN_valid]", "[:]")
ODD, EVEN = {"M": 64, "N": 256, "K": 384}, {"M": 64, "N": 256, "K": 512}


def make(folder: Path, *changes: tuple[str, str, str]) -> Path:
    """A tree of today with changes: file, text, new text."""
    root = make_tree(folder, "newest").root
    for name, old, new in changes:
        change(root / name, (old, new))
    return root


def state(root: Path) -> dict[str, str]:
    """Every file below a folder with its hash."""
    return {
        str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(root.rglob("*"))
        if p.is_file()
    }


@pytest.mark.parametrize(
    ("name", "changed"),
    [("asm_dir_symlink", PLAIN_CORE), ("tile_column_case", OLD_NAMES), ("k_trim", UNTRIMMED)],
)
def test_needed_and_applied(tmp_path: Path, name: str, changed: tuple[str, str, str]) -> None:
    root = make(tmp_path / "real", changed)
    before, found = state(root), inspect(root)
    assert needed_workarounds(found, A4W4, [ODD]) == [name]
    scratch, (applied,) = apply_workarounds(found, [name], tmp_path / "scratch")
    assert inspect(scratch.tree).workarounds[name].verdict != "needed"
    assert (applied["name"], applied["source"][:11]) == (name, "ROCm/aiter ")
    assert applied["evidence"]
    for entry in applied["files"]:
        assert entry["sha256_before"] == before.get(entry["file"], "") != entry["sha256_after"]
    assert state(root) == before


def test_two_in_one_file(tmp_path: Path) -> None:
    found = inspect(make(tmp_path / "real", OLD_NAMES, UNTRIMMED))
    names = needed_workarounds(found, A4W4, [EVEN, ODD])
    assert names == ["tile_column_case", "k_trim"]
    assert needed_workarounds(found, A4W4, [EVEN]) == names[:1]
    assert needed_workarounds(found, FAMILIES["a8w8_bpreshuffle"], [ODD]) == []
    scratch, applied = apply_workarounds(found, names, tmp_path / "scratch")
    assert applied[1]["files"][0]["sha256_before"] == applied[0]["files"][0]["sha256_after"]
    text = scratch.tree.scripts[A4W4.name].read_text()
    assert "['tile_M', \"tile_N\", " in text
    assert "x_f32 = x_f32 * x_scales_f32[..., : x_f32.shape[-1]]" in text


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    tree = inspect(make(tmp_path / "real")).tree
    before = state(tree.root)
    made = ScratchTree.with_files(tree, tmp_path / "scratch", {LIST: "x\n", "aiter/new/y.json": "y\n"}, [SCRIPT])
    assert ((made.root / LIST).read_text(), (made.root / "aiter/new/y.json").read_text()) == ("x\n", "y\n")
    assert not (made.root / SCRIPT).exists()
    with pytest.raises(OSError, match="outside of the tree"):
        ScratchTree.with_files(tree, tmp_path / "scratch", {"aiter/../../real/aiter/aiter/__init__.py": ""})
    assert state(tree.root) == before
