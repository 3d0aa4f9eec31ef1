"""Trees of AITER are found and read without importing them, whatever state they are in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kits.worker import interpreters
from tests.paths import ROOT
from tests.standins.aiter import make_tree
from worker.aiter_tree import locate
from worker.aiter_tree.locate import NotATreeError, find_trees, imported_package, pick, tree_at
from worker.tuners.aiter.findings import inspect

A4W4 = "a4w4_blockscale"
SCRIPT = "csrc/ck_gemm_a4w4_blockscale/gemm_a4w4_blockscale_tune.py"
LIST = "hsa/gfx950/f4gemm/f4gemm_bf16_per1x32Fp4.csv"
CORE, QUANTISER = "aiter/jit/core.py", "aiter/utility/fp4_utils.py"


def make(folder: Path) -> Path:
    """A tree of today in this very folder."""
    made = make_tree(folder.with_name(f"{folder.name}-of"), "newest").root
    folder.parent.mkdir(parents=True, exist_ok=True)
    return made.rename(folder)


def test_a_tree_of_today(tmp_path: Path) -> None:
    told = json.loads(json.dumps(inspect(make(tmp_path / "x")).as_json()))
    script = told["families"][A4W4]
    assert (script["script"], script["columns"]) == (SCRIPT, ["M", "N", "K"])
    assert script["flags"].items() >= {"--untune_file": "value", "--sort": "value", "--all": "flag"}.items()
    assert "--splitK" not in told["families"]["batched_gemm_a8w8_blockscale_mxscale"]["flags"], "it takes it back"
    assert (told["asm_dir"], told["k256_sound"], told["promised"], told["problems"]) == ("hsa/{gfx}", True, True, [])
    assert {n: w["verdict"] for n, w in told["workarounds"].items()} == {
        "asm_dir_symlink": "harmless", "tile_column_case": "harmful", "k_trim": "harmless"
    }  # fmt: skip
    assert told["workarounds"]["tile_column_case"]["evidence"][0] == (
        f"{LIST}:1: tile_M,tile_N,splitK,bpreshuffle,knl_name,co_name"
    )


def test_what_cannot_be_read_is_said_and_judged_with_care(tmp_path: Path) -> None:
    root = make(tmp_path / "x")
    for name, text in ((SCRIPT, "def broken(:\n"), (CORE, "x = ("), (LIST, "tile_M,\x1b[2Jsplit\u202eK\n")):
        (root / name).write_text(text)
    for name in ("aiter/utility/mp_tuner.py", QUANTISER):
        (root / name).unlink()
    os.mkfifo(root / "aiter/utility/mp_tuner.py")
    (root / QUANTISER).symlink_to("fp4_utils.py")
    (root / "aiter/utility/base_tuner.py").write_text("#" * (locate.MAX_BYTES + 1))
    found = inspect(root)
    assert not found.k256_sound
    assert found.misfit
    assert "needed" not in {v.verdict for v in found.workarounds.values()}
    told = " ".join(found.problems)
    for words in ("line 1", "not a regular file", "symbolic links", "more than"):
        assert words in told
    assert not [c for c in ("\\u001b", "\\u202e") if c in json.dumps(found.as_json())], "they would reach a terminal"


def wheel(site: Path) -> Path:
    make(site)
    meta = site / "aiter_meta"
    meta.mkdir()
    for name in ("csrc", "hsa"):
        (site / name).rename(meta / name)
    (site / "aiter/install_mode").write_text("install")
    info = site / "amd_aiter-0.1.14.post1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: amd-aiter\nVersion: 0.1.14.post1\n")
    (info / "direct_url.json").write_text(json.dumps({"vcs_info": {"commit_id": "ab" * 20}}))
    return site


def test_a_tree_is_known_by_any_of_its_folders_and_nothing_else_is_one(tmp_path: Path) -> None:
    found = inspect(wheel(tmp_path / "site"))
    assert (found.tree.version, found.tree.commit) == ("0.1.14.post1", "ab" * 20)
    assert found.as_json()["families"][A4W4]["script"] == f"aiter_meta/{SCRIPT}"
    for folder in ("aiter", "aiter_meta"):
        assert tree_at(tmp_path / "site" / folder).root == tmp_path / "site"
    make(tmp_path / "deep/aiter")
    (tmp_path / "file").touch()
    for name, words in (("none", "none cannot be read"), ("file", "file cannot be read"), ("deep", "deep/aiter is")):
        with pytest.raises(NotATreeError, match=words):
            tree_at(tmp_path / name)


def test_one_tree_is_used_and_never_a_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The image of the runbook: the package imports from one tree, scripts were run from another."""
    imported, other = make(tmp_path / "app/aiter-test"), make(tmp_path / "root/aiter")
    monkeypatch.setattr(locate, "PLACES", [])
    monkeypatch.setattr(sys, "path", [str(tmp_path / "app"), str(imported)])
    assert imported_package() == imported / "aiter"
    trees = find_trees([other])
    assert [(t.root, t.imported) for t in trees] == [(imported, True), (other, False)]
    chosen, notes = pick(trees, family=A4W4)
    assert chosen.root == imported
    assert any(str(other) in note for note in notes)
    chosen, notes = pick(trees, other)
    assert any("never a mix" in note for note in notes)
    assert all(other in path.parents for path in (chosen.package, *chosen.scripts.values()))
    bare = make(tmp_path / "bare")
    (bare / SCRIPT).unlink()
    monkeypatch.setattr(sys, "path", [str(bare)])
    trees = find_trees([other])
    assert pick(trees, family=A4W4)[0].root == other, "whole, as the imported one lacks the script"
    with pytest.raises(NotATreeError, match="the AITER of this image has no tuner script for "):
        pick(trees, family="none")
    with pytest.raises(NotATreeError, match="root: PATH"):
        pick([])
    monkeypatch.setattr(sys, "path", [str(tmp_path / "root")])
    assert imported_package() is None, "a folder of that name is not a package"


def test_the_verb(tmp_path: Path) -> None:
    root = make_tree(tmp_path, "runbook").root
    for python in interpreters().values() or [sys.executable]:
        argv = [python, "-m", "worker", "probe", "--aiter-root", str(root)]
        done = subprocess.run([*argv, "--json"], cwd=ROOT, capture_output=True, text=True, check=True)
        told = json.loads(done.stdout)
        assert {w["verdict"] for w in told["workarounds"].values()} == {"needed"}
    argv[-1] = str(tmp_path / "none")
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr[:7]) == (2, "", "error: ")
    env = {**os.environ, "PYTHONPATH": str(wheel(tmp_path / "image"))}
    argv = [sys.executable, "-m", "worker", "probe", "--json"]
    here = json.loads(subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout)
    assert here["aiter"]["imported"] == str(tmp_path / "image/aiter")
    assert (here["aiter"]["chosen"], here["aiter"]["trees"][0]["version"]) == (str(tmp_path / "image"), "0.1.14.post1")
