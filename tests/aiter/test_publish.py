"""AITER's own repository as the checkout: its merge read at several dates, and a branch held to its own checks."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from orchestrator.configs.merge import to_publish
from orchestrator.results.export import RunFacts
from orchestrator.tables.check import Build
from orchestrator.tables.publish import publish
from orchestrator.tables.tuned import read_table
from tests.aiter.checkout import AITER_GIT, commit_of, needs_checkout, take_out
from tests.aiter.realbase import RealTree, make
from worker.families import FAMILIES

pytestmark = needs_checkout
NEWEST = "e4048607a5"
A4W4 = FAMILIES["a4w4_blockscale"]
MNK = ("M", "N", "K")
MERGES = {
    # (model_configs, a key twice stops it, one header, the key's columns)
    "v0.1.7": (True, False, True, MNK),
    "94a6edda3a": (True, True, True, ("cu_num", *MNK)),
    "v0.1.12.post2": (True, True, True, ("gfx", "cu_num", *MNK)),
    NEWEST: (True, True, False, ("gfx", "cu_num", *MNK)),
}


@pytest.mark.parametrize("version", MERGES)
def test_the_merge_at_aiters_start_is_read_from_its_files(version: str, tmp_path: Path) -> None:
    take_out(version, tmp_path, "aiter/configs", "aiter/jit", "csrc", ":(glob)hsa/**/*.csv")
    build = Build(tmp_path)
    start = build.start(A4W4)
    assert (start.folder, start.stops, start.one_header, start.names) == MERGES[version]
    assert {"gfx942", "gfx950"} <= build.chips
    keys = {f.name: build.start(f).names for f in FAMILIES.values()}
    assert ("q_dtype_w" in keys["a8w8"]) == (version != "v0.1.7")
    if version == NEWEST:
        assert not build.start(FAMILIES["batched_gemm_a8w8_blockscale_mxscale"]).stops  # it has no list of shapes
        for family in FAMILIES.values():
            own = build.header(family)
            assert not own or family.two_stages or own == family.tuned_header, family.name


@pytest.fixture
def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RealTree:
    """A tree with a Python that imports AITER on this CPU."""
    tree = make(tmp_path / "real", NEWEST)
    for name, value in (("ROOT", str(tree.root)), ("FAULTS", "[]")):
        monkeypatch.setenv(f"REAL_AITER_{name}", value)
    return tree


def clone(folder: Path) -> Path:
    """A clone without a work tree, whose HEAD is the newest commit that was read."""
    subprocess.run(["git", "clone", "-q", "--shared", "--no-checkout", AITER_GIT, str(folder)], check=True, timeout=300)
    git = ["git", "-C", str(folder)]
    subprocess.run([*git, "update-ref", "--no-deref", "HEAD", commit_of(NEWEST)], check=True)
    for name, value in (("user.name", "A Person"), ("user.email", "a@person")):
        subprocess.run([*git, "config", name, value], check=True)
    return folder


def test_a_branch_of_the_real_repository_passes_aiters_own_checks(tmp_path: Path, real: RealTree) -> None:
    """A row of another model's table at half its time with another kernel, and one that AITER lacks."""
    take_out(NEWEST, tmp_path / "files", "aiter/configs")
    there = tmp_path / "files" / "aiter" / "configs" / "model_configs" / "kimik3_a4w4_blockscale_tuned_gemm.csv"
    shipped = read_table(there, A4W4, lenient=True)
    first, other = shipped.rows[0], next(
        r for r in shipped.rows if shipped.cells(r)["kernelName"] != shipped.cells(shipped.rows[0])["kernelName"]
    )  # fmt: skip
    kernel = {n: shipped.cells(other)[n] for n in ("kernelId", "kernelName")}
    faster = shipped.cells(first) | kernel | {"us": f"{(first.us or 1) / 2:.4f}"}
    new = shipped.cells(first) | {"M": "77"}
    table = tmp_path / "mine_a4w4_blockscale_tuned_gemm.csv"
    table.write_text("\n".join((",".join(shipped.header), *(",".join(r.values()) for r in (faster, new)))) + "\n")
    found = publish(
        [table], clone(tmp_path / "aiter"), "mine", tmp_path / "out", RunFacts, to_publish, python=str(real.python)
    )
    results = {name: result for name, result, _ in found.checks}
    assert found.ok
    assert results == {
        "`db check --build` of gemmfleet, a4w4_blockscale": "safe in this branch, over all tables that it merges",
        "`test_csv_validation`": "passes",
        "`test_config_shape_collision`": "passes",
    }
    assert found.files == {
        "aiter/configs/model_configs/kimik3_a4w4_blockscale_tuned_gemm.csv": {"edited": 1},
        "aiter/configs/model_configs/mine_a4w4_blockscale_tuned_gemm.csv": {"added": 1},
        "aiter/configs/model_configs/mine_a4w4_blockscale_untuned_gemm.csv": {"shapes": 2},
    }
