"""Trees of AITER are found and read without importing them, whatever state they are in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.standins.aiter import make_tree
from tests.support import aitertree
from tests.support.aitertree import LIST, SCRIPT, make
from tests.support.workernode import REPO, interpreters
from worker.aiter_tree import locate
from worker.aiter_tree.locate import NotATreeError, find_trees, imported_package, pick, tree_at
from worker.families import FAMILIES
from worker.tuners.aiter.findings import Findings, inspect

UNTRIMMED = aitertree.QUANTISER.replace("[:M, :scaleN_valid]", "[:M]").replace("16 * scaleN_pad", "16 * scaleN")
UNSOUND = aitertree.QUANTISER.replace("16 * scaleN_pad", "16 * scaleN")
MERGES = "FOLDER = 'model_configs'\n"
A4W4, MXSCALE = "a4w4_blockscale", "batched_gemm_a8w8_blockscale_mxscale"


def verdicts(found: Findings) -> dict[str, str]:
    return {name: v.verdict for name, v in found.workarounds.items()}


def test_a_tree_of_today(tmp_path: Path) -> None:
    """By the document that `worker probe --aiter-root` prints."""
    found = inspect(make(tmp_path))
    told = json.loads(json.dumps(found.as_json()))
    script = told["families"][A4W4]
    assert script["flags"] == {
        "--untune_file": "value", "--profile_file": "value", "--sort": "value", "--batch": "value",
        "--timeout": "value", "--all": "flag", "--blockPerCu": "value",
    }  # fmt: skip
    assert (script["script"], script["columns"]) == (SCRIPT, ["M", "N", "K"])
    assert (told["asm_dir"], told["k256_sound"], told["promised"]) == ("hsa/{gfx}", True, True)
    assert verdicts(found) == {"asm_dir_symlink": "harmless", "tile_column_case": "harmful", "k_trim": "harmless"}
    assert all(w["evidence"] for w in told["workarounds"].values())
    assert told["workarounds"]["tile_column_case"]["evidence"][0] == f"{LIST}:1: {aitertree.TABLE.splitlines()[0]}"
    assert told["problems"] == []


@pytest.mark.parametrize("date", ["runbook", "newest"])
def test_stand_ins_are_read_as_what_they_are(tmp_path: Path, date: str) -> None:
    """A script may take an option back that its base has."""
    found = inspect(make_tree(tmp_path, date).root)
    new = date == "newest"
    assert found.problems == ()
    assert found.asm_dir == ("hsa/{gfx}" if new else "hsa")
    assert verdicts(found) == {
        "asm_dir_symlink": "harmless" if new else "needed",
        "tile_column_case": "harmful" if new else "needed",
        "k_trim": "harmless" if new else "needed",
    }
    assert (found.k256_sound, found.promised) == (new, True)
    assert found.families[A4W4].flags["--sort"] == ("value" if new else "flag")
    assert ("--run_config" in found.families[A4W4].flags) == new
    if new:
        script = found.families[MXSCALE]
        assert FAMILIES[MXSCALE].from_aiter(script.columns) == ("B", "M", "N", "K")
        assert "--splitK" not in script.flags
        assert script.flags["--K"] == "value"


@pytest.mark.parametrize(
    ("changes", "promised"),
    [
        ({}, True),
        ({"quantiser": UNSOUND}, False),  # 2026-03-18 to v0.1.13: trims, and lays out wrongly
        ({"quantiser": UNTRIMMED, "core": aitertree.CORE + MERGES}, True),  # 2025-11 to 2026-03
        ({"quantiser": UNTRIMMED}, False),  # older
        ({"quantiser": None}, False),
    ],
)
def test_two_windows_are_promised(tmp_path: Path, changes: dict[str, str], promised: bool) -> None:
    assert inspect(make(tmp_path, **changes)).promised == promised


def test_what_cannot_be_parsed_is_said_and_judged_with_care(tmp_path: Path) -> None:
    found = inspect(make(tmp_path, script="def broken(:\n", quantiser=None, core="x = ("))
    assert found.families[A4W4].flags == {}
    assert not found.k256_sound
    assert "needed" not in verdicts(found).values()
    assert any("line 1" in p for p in found.problems)


def test_files_that_cannot_be_read_are_said(tmp_path: Path) -> None:
    root = make(tmp_path / "aiter-test", quantiser=None, table="tile_M,tile_N,\x1b[2Jsplit\u202eK\n")
    (root / SCRIPT).write_text("#" * (locate.MAX_BYTES + 1))
    (root / "aiter/utility/mp_tuner.py").unlink()
    os.mkfifo(root / "aiter/utility/mp_tuner.py")
    (root / "aiter/utility/fp4_utils.py").symlink_to("fp4_utils.py")
    (root / "loop").symlink_to(root)
    found = inspect(root)
    told = " ".join(found.problems)
    for words in ("more than", "no regular file", "symbolic links"):
        assert words in told
    said = json.dumps(found.as_json())
    assert not [c for c in ("\\u001b", "\\u202e") if c in said], "they would reach a terminal"
    (tmp_path / "round").symlink_to("round")
    with pytest.raises(NotATreeError, match="leads nowhere"):
        tree_at(tmp_path / "round")


def test_no_tree_is_a_clear_word(tmp_path: Path) -> None:
    with pytest.raises(NotATreeError, match="does not exist"):
        tree_at(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(NotATreeError, match="no folder"):
        tree_at(tmp_path / "file")
    (tmp_path / "half/csrc").mkdir(parents=True)
    with pytest.raises(NotATreeError, match="half of a tree"):
        tree_at(tmp_path / "half")
    make(tmp_path / "deep/aiter")
    with pytest.raises(NotATreeError, match="deep/aiter is"):
        tree_at(tmp_path / "deep")


def test_a_tree_is_known_by_any_of_its_folders(tmp_path: Path) -> None:
    root = make(tmp_path / "x")
    assert tree_at(root / "aiter").root == root
    (root / "csrc").rename(root / "c")
    (root / "aiter_meta").mkdir()
    (root / "c").rename(root / "aiter_meta/csrc")
    assert tree_at(root / "aiter_meta").root == root


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


def test_a_wheel_has_its_scripts_in_aiter_meta(tmp_path: Path) -> None:
    found = inspect(wheel(tmp_path))
    assert found.tree.wheel
    assert (found.tree.version, found.tree.commit) == ("0.1.14.post1", "ab" * 20)
    assert found.as_json()["families"][A4W4]["script"] == f"aiter_meta/{SCRIPT}"
    assert verdicts(found)["asm_dir_symlink"] == "harmless"


def test_what_a_tree_says_of_itself(tmp_path: Path) -> None:
    """An install_mode that is wrong, a version of setuptools-scm; the commit by git's own files, of a worktree too."""
    root = make(tmp_path / "a")
    (root / "aiter/install_mode").write_text("install")
    tree = tree_at(root)
    assert tree.meta == root
    assert {word for word in ("install_mode", ".git") if any(word in note for note in tree.notes)} == {
        "install_mode", ".git"
    }  # fmt: skip
    (root / "aiter/install_mode").unlink()
    (root / "aiter/_version.py").write_text("__version__ = '0.1.9.post2.dev3+gda29487171.d20260115'\n")
    tree = tree_at(root)
    assert (tree.version[:11], tree.commit) == ("0.1.9.post2", "da29487171")
    sha = "12" * 20
    git = root / ".git"
    git.mkdir()
    (git / "packed-refs").write_text(f"# pack-refs with: peeled\n{sha} refs/heads/main\n")
    for head, commit in (("ref: refs/heads/main\n", sha), (sha, sha), ("ref: ../../etc/passwd", "da29487171")):
        (git / "HEAD").write_text(head)
        assert tree_at(root).commit == commit
    main = tmp_path / "main/.git/worktrees/w"
    main.mkdir(parents=True)
    (main / "HEAD").write_text("ref: refs/heads/b\n")
    (main / "commondir").write_text("../..\n")
    (tmp_path / "main/.git/refs/heads").mkdir(parents=True)
    (tmp_path / "main/.git/refs/heads/b").write_text("cd" * 20)
    worktree = make(tmp_path / "w")
    (worktree / ".git").write_text(f"gitdir: {main}\n")
    assert tree_at(worktree).commit == "cd" * 20


def test_one_tree_is_used_and_never_a_mix(tmp_path: Path) -> None:
    """The image of the runbook: the package imports from one tree, scripts were run from another."""
    imported, other = make(tmp_path / "app/aiter-test"), make(tmp_path / "root/aiter")
    trees = find_trees((), places=(str(other),), path=[str(imported)])
    assert [(t.root, t.imported) for t in trees] == [(imported, True), (other, False)]
    chosen, notes = pick(trees, family=A4W4)
    assert chosen.root == imported
    assert any(str(other) in note for note in notes)
    chosen, notes = pick(trees, other)
    assert chosen.root == other
    assert any("never a mix" in note for note in notes)
    assert all(chosen.root in path.parents for path in chosen.scripts.values())


def test_without_a_script_in_the_imported_tree_another_one_is_whole(tmp_path: Path) -> None:
    imported, other = make(tmp_path / "a", script=None), make(tmp_path / "b")
    trees = find_trees((other,), places=(), path=[str(imported)])
    assert pick(trees, family=A4W4)[0].root == other
    with pytest.raises(NotATreeError, match="no AITER of this image has"):
        pick(trees, family="fmoe")
    with pytest.raises(NotATreeError, match="root: PATH"):
        pick([])


def test_a_folder_of_that_name_is_no_package(tmp_path: Path) -> None:
    make(tmp_path / "aiter")
    assert imported_package([str(tmp_path)]) is None
    assert imported_package([str(tmp_path / "aiter")]) == tmp_path / "aiter/aiter"


def test_the_verb(tmp_path: Path) -> None:
    root = make(tmp_path / "aiter", core=aitertree.PLAIN_CORE)
    for python in interpreters().values() or [sys.executable]:
        argv = [python, "-m", "worker", "probe", "--aiter-root", str(root)]
        done = subprocess.run([*argv, "--json"], cwd=REPO, capture_output=True, text=True, check=True)
        told = json.loads(done.stdout)
        assert told["asm_dir"] == "hsa"
        assert told["workarounds"]["asm_dir_symlink"]["verdict"] == "needed"
        text = subprocess.run(argv, cwd=REPO, capture_output=True, text=True, check=True).stdout
        assert json.loads(text) == told
        assert len(text.splitlines()) > 20, "for people"
    argv[-1] = str(tmp_path / "none")
    done = subprocess.run(argv, cwd=REPO, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert "does not exist" in done.stderr


def test_the_verb_without_a_root_says_which_aiter_is_here(tmp_path: Path) -> None:
    root = wheel(tmp_path / "site")
    env = {**os.environ, "PYTHONPATH": str(root)}
    argv = [sys.executable, "-m", "worker", "probe"]
    done = subprocess.run([*argv, "--json"], cwd=REPO, env=env, capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    assert told["aiter"]["imported"] == str(root / "aiter")
    assert told["aiter"]["chosen"] == str(root)
    assert told["aiter"]["trees"][0]["version"] == "0.1.14.post1"
    text = subprocess.run(argv, cwd=REPO, env=env, capture_output=True, text=True, check=True).stdout
    assert f"aiter        {root} 0.1.14.post1 {'ab' * 5} imported, used" in text
