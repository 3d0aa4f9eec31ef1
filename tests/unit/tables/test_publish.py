"""`gemmfleet publish`: a branch in a small checkout of AITER's layout, made, checked, and made again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.configs import aiter as merging
from orchestrator.configs.aiter import Call, Trial
from orchestrator.errors import InputError
from orchestrator.tables import publish as publishing
from orchestrator.tables.policy import Judged, NewcomerPool, incumbent
from orchestrator.tables.rules import RowRules
from tests.support import config_tree
from tests.support.aiterbuild import ASM, CK, CK2
from tests.support.aitercheckout import A4W4, BLOCKSCALE, SKIPPED, TILE, checkout, commit, git, line, show, text

MODEL = "aiter/configs/model_configs/llama_a4w4_blockscale_tuned_gemm.csv"
SHAPES = MODEL.replace("tuned", "untuned")
MAIN = f"aiter/configs/{A4W4.tuned_csv}"
OTHER = "model_configs/other_a4w4_blockscale_tuned_gemm.csv"
BRANCH = "gemmfleet/llama-a4w4_blockscale"


@pytest.fixture
def aiter(tmp_path: Path) -> Path:
    """A checkout in which one key is in the shared table, and one in another model's."""
    return checkout(tmp_path / "aiter", {
        A4W4.tuned_csv: text(A4W4, line(A4W4, M=900, kernelName=CK), line(A4W4, M=910, kernelName=CK)),
        OTHER: text(A4W4, line(A4W4, M=901, kernelName=CK, us="20.50"), line(A4W4, M=902, kernelName=CK)),
    })  # fmt: skip


def table(folder: Path, *lines: str) -> Path:
    path = folder / "mine_a4w4_blockscale_tuned_gemm.csv"
    path.write_text(text(A4W4, *lines))
    return path


def publish(*words: object, model: str = "llama") -> tuple[int, str, str]:
    """(exit code, output, notes); a user's mistake raises."""
    done = CliRunner().invoke(app, ["publish", *map(str, words), "--model", model])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


def published(*words: object) -> dict[str, Any]:
    code, out, _ = publish(*words, "--json")
    document: dict[str, Any] = json.loads(out)
    assert (code == 0) == document["ok"]
    return document


ROWS = (
    line(A4W4, M=8, N=128, kernelName=ASM), line(A4W4, M=16, kernelName=ASM),
    line(A4W4, M=4, kernelName=CK2, kernelId=1),
    line(A4W4, M=901, kernelName=ASM, us=5.0), line(A4W4, M=900, kernelName=ASM, us=9.9),
)  # fmt: skip


def test_new_rows_get_files_of_the_model_and_a_faster_row_is_edited_where_it_is(tmp_path: Path, aiter: Path) -> None:
    found = published(table(tmp_path, *ROWS), "--onto", aiter)
    assert found["branch"] == BRANCH
    assert show(aiter, BRANCH, MODEL) == text(
        A4W4, line(A4W4, M=4, kernelName=CK2, kernelId=1), line(A4W4, M=16, kernelName=ASM),
        line(A4W4, M=8, N=128, kernelName=ASM),
    )  # fmt: skip
    assert show(aiter, BRANCH, SHAPES) == "M,N,K\n4,64,128\n16,64,128\n900,64,128\n901,64,128\n8,128,128\n"
    changed = git(aiter, "diff", "--unified=0", "main", BRANCH, "--", f"aiter/configs/{OTHER}").splitlines()[5:]
    assert changed == [
        f"-{line(A4W4, M=901, kernelName=CK, us='20.50')}",
        f"+{line(A4W4, M=901, kernelName=ASM, us=5.0)}",
    ]
    assert git(aiter, "diff", "--name-only", "main", BRANCH).split() == [MODEL, SHAPES, f"aiter/configs/{OTHER}"]
    assert {r["outcome"]: r["why"] for r in found["rows"]} == {
        "added": "the table had no row of this key",
        "edited": "faster by 75.6%",
        "kept": "faster by 1.0%, which is not more than the margin of 3.0%",
    }
    assert [(r["rebuild"], r["outcome"]) for r in found["rows"] if r["key"]["M"] == 4] == [(True, "added")]
    assert list(found["checks"].values()) == [
        "safe in this branch, over all tables that it merges", "passes", "passes",
    ]  # fmt: skip


def test_nothing_else_of_the_checkout_moves(tmp_path: Path, aiter: Path) -> None:
    (aiter / MAIN).write_text("work of mine")
    hook = aiter / ".git" / "hooks" / "post-commit"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    hook.chmod(0o755)
    published(table(tmp_path, *ROWS), "--onto", aiter)
    assert (aiter / MAIN).read_text() == "work of mine"
    assert git(aiter, "branch", "--show-current") == "main\n"
    assert git(aiter, "worktree", "list").count("\n") == 1
    assert not (tmp_path / "ran").exists()
    assert not git(aiter, "remote")
    log = git(aiter, "log", "--format=%an|%s|%b", f"main..{BRANCH}").split("\n")
    subject = "A Person|[Config] Tune llama a4w4_blockscale (fp4) GEMMs for gfx950"
    assert [x for x in log if x] == [
        f"{subject}: rows that other files own|Published-by: gemmfleet", f"{subject}|Published-by: gemmfleet",
    ]  # fmt: skip


def test_rows_that_must_not_be_served_are_refused_by_name(tmp_path: Path, aiter: Path) -> None:
    rows = (
        line(A4W4, M=1, kernelName=ASM), line(A4W4, M=2, kernelName=CK + "x"), line(A4W4, M=3, kernelName="Cijk_A"),
        line(A4W4, M=5, kernelName="torch_lut256_t2"), line(A4W4, M=6, kernelName=ASM, cu_num=250),
        line(A4W4, M=7, kernelName=ASM, errRatio=0.2), line(A4W4, M=8, kernelName=ASM, us=-1),
    )  # fmt: skip
    found = published(table(tmp_path, *rows), "--onto", aiter)
    refused = {r["key"]["M"]: r["why"] for r in found["rows"] if r["outcome"] == "refused"}
    assert sorted(refused) == [2, 3, 5, 6]
    assert "hipBLASLt" in refused[3]
    assert show(aiter, BRANCH, MODEL).count("\n") == 2
    body = Path(found["text"]).read_text()
    assert "rows refused: 6" in body
    assert "its us is -1" in body
    with pytest.raises(InputError) as e:
        publish(table(tmp_path, rows[1]), "--onto", aiter, "--branch", "b2")
    assert e.value.faults[0].startswith("nothing to publish onto ")
    assert "lists no kernel" in e.value.faults[1]
    assert "b2" not in git(aiter, "branch")


def test_the_model_has_a_table_already(tmp_path: Path, aiter: Path) -> None:
    there = {
        MODEL: text(A4W4, line(A4W4, M=7, kernelName=CK), line(A4W4, M=16, kernelName=CK, us=50.0)),
        SHAPES: "M,N,K\n7,64,128\n",
    }  # fmt: skip
    commit(aiter, "of the model", there)
    found = published(table(tmp_path, *ROWS[:3]), "--onto", aiter)
    assert [x.split(",")[2] for x in show(aiter, BRANCH, MODEL).splitlines()] == ["M", "4", "7", "16", "8"]
    assert show(aiter, BRANCH, SHAPES) == "M,N,K\n7,64,128\n4,64,128\n16,64,128\n8,128,128\n"
    assert found["files"] == {MODEL: {"added": 2, "edited": 1}, SHAPES: {"shapes": 3}}


def test_refresh_makes_the_branch_again_on_a_newer_main(tmp_path: Path, aiter: Path) -> None:
    """#5072: others add the same keys meanwhile; a rebase by text would leave them twice."""
    mine = table(tmp_path, *ROWS)
    old = published(mine, "--onto", aiter)
    with pytest.raises(InputError, match="--refresh makes it again on the newer base"):
        publish(mine, "--onto", aiter)
    newer = "aiter/configs/model_configs/newer_a4w4_blockscale_tuned_gemm.csv"
    commit(aiter, "newer", {newer: text(A4W4, line(A4W4, M=16, kernelName=CK), line(A4W4, M=4, kernelName=CK, us=1.0))})
    found = published(mine, "--onto", aiter, "--refresh")
    assert found["base"] == git(aiter, "rev-parse", "main").strip() != old["base"]
    assert git(aiter, "merge-base", "main", BRANCH).strip() == found["base"]
    assert [x.split(",")[2] for x in show(aiter, BRANCH, MODEL).splitlines()] == ["M", "8"]
    assert {r["key"]["M"]: r["outcome"] for r in found["rows"]} == {
        4: "kept", 16: "kept", 8: "added", 900: "kept", 901: "edited",
    }  # fmt: skip
    assert found["checks"]["`db check --build` of gemmfleet, a4w4_blockscale"].startswith("safe in this branch")
    with pytest.raises(InputError, match="is not a branch there"):
        publish(mine, "--onto", aiter, "--refresh", "--branch", "another")


def test_refresh_keeps_commits_of_others_and_a_branch_that_is_checked_out(tmp_path: Path, aiter: Path) -> None:
    mine = table(tmp_path, *ROWS)
    published(mine, "--onto", aiter)
    git(aiter, "switch", "-q", BRANCH)
    with pytest.raises(InputError, match="is checked out; switch to another branch"):
        publish(mine, "--onto", aiter, "--refresh", "--base", "main")
    tip = commit(aiter, "by hand", {"notes.txt": "x"})
    git(aiter, "switch", "-q", "main")
    with pytest.raises(InputError, match=r"has commits that publish did not make \(\w+ by hand\)"):
        publish(mine, "--onto", aiter, "--refresh")
    assert git(aiter, "rev-parse", BRANCH).strip() == tip


def test_a_failure_that_the_base_has_is_told_from_a_new_one(tmp_path: Path, aiter: Path) -> None:
    commit(aiter, "broken", {MAIN: text(A4W4, line(A4W4, M=1, us=0, kernelName=CK))})
    found = published(table(tmp_path, *ROWS[:2]), "--onto", aiter)
    assert found["checks"]["`test_csv_validation`"].startswith("fails as on the base: test_tables")
    logs = Path(found["text"]).parent / "checks"
    assert sorted(p.name for p in logs.iterdir()) == [
        f"{name}.{word}.log"
        for name in ("test_config_shape_collision", "test_csv_validation")
        for word in ("base", "branch")
    ]
    both = "test_config_shape_collision.py"
    refusing = "import os, unittest\nclass Test(unittest.TestCase):\n    def test_new(self):\n"
    refusing += f"        self.assertFalse(os.path.exists({MODEL!r}))\n"
    commit(aiter, "strict", {f"op_tests/tuning_tests/{both}": refusing})
    code, out, _ = publish(table(tmp_path, *ROWS[:2]), "--onto", aiter, "--branch", "b2")
    assert code == 1
    assert "test_config_shape_collision: FAILS: test_new" in out
    assert "b2" in git(aiter, "branch")  # it is left, to be looked at


def test_a_check_that_cannot_run_is_not_green(tmp_path: Path) -> None:
    root = checkout(tmp_path / "aiter", guard=SKIPPED)
    found = published(table(tmp_path, *ROWS[:2]), "--onto", root)
    assert found["checks"]["`test_config_shape_collision`"] == (
        "not run: it skips itself: aiter.jit.core not importable: No module named 'torch'"
    )
    assert "skips itself" in Path(found["text"]).read_text()
    (root / "op_tests" / "tuning_tests" / "test_csv_validation.py").unlink()
    commit(root, "older")
    found = published(table(tmp_path, *ROWS[:2]), "--onto", root, "--branch", "b2")
    assert found["checks"]["`test_csv_validation`"] == "not run: this AITER has no such check"
    assert (
        "test_csv_validation`"
        not in published(table(tmp_path, *ROWS[:2]), "--onto", root, "--branch", "b3", "--no-checks")["checks"]
    )


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("--onto", "{tmp}/none"), "did not end|No such file|cannot change to"),
        (("--onto", "{tmp}"), "not a git repository"),
        (("--onto", "{tmp}/aiter", "--base", "v9"), "has no commit 'v9'; fetch it there first"),
        (("--onto", "{tmp}/aiter", "--branch", "a..b"), "not a valid branch name"),
        (("--onto", "{tmp}/aiter", "--verify"), "name the nodes with -i INV"),
        (("--onto", "{tmp}/aiter", "--title", "Tune bf16 GEMMs"), "--title names bf16, and the rows are of fp4"),
    ],
)
def test_mistakes_are_one_line_and_leave_no_branch(
    tmp_path: Path, aiter: Path, words: tuple[str, ...], fault: str
) -> None:
    with pytest.raises(InputError, match=fault):
        publish(table(tmp_path, *ROWS), *(w.format(tmp=tmp_path) for w in words))
    assert git(aiter, "branch", "--list") == "* main\n"


def test_two_families_in_one_branch(tmp_path: Path, aiter: Path) -> None:
    other = tmp_path / f"b_{BLOCKSCALE.tuned_csv}"
    other.write_text(text(BLOCKSCALE, line(BLOCKSCALE, M=1, libtype="cktile", kernelName=TILE)))
    found = published(table(tmp_path, *ROWS[:2]), other, "--onto", aiter)
    assert found["branch"] == "gemmfleet/llama-a4w4_blockscale-a8w8_blockscale"
    assert "aiter/configs/model_configs/a8w8_blockscale_tuned_gemm_llama.csv" in found["files"]
    assert found["title"] == "[Config] Tune llama a4w4_blockscale (fp4) and a8w8_blockscale (fp8) GEMMs for gfx950"


def test_triton_configs_become_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def trial(root: Path, arch: str, calls: Sequence[Call], *, alone: bool) -> Trial:
        return config_tree.resolved(root, arch, calls)

    monkeypatch.setattr(merging, "run_trial", trial)
    root = checkout(tmp_path / "aiter")
    default = "gemm/gfx950-GEMM-A16W16.json"
    config_tree.tree(root, {default: {"M_LEQ_64": config_tree.values(32), "any": config_tree.values(128)}})
    commit(root, "configs")
    own = "gfx950-GEMM-A16W16-N=512-K=1024.json"
    run = config_tree.winners(tmp_path / "r1", {own: {"M_LEQ_64": config_tree.values(16)}}, [{}])
    device = {"device": "AMD Instinct MI355X", "versions": {"rocm": "7.1"}, "aiter": {"commit": "abc"}}
    document = {
        "run": "r1", "tuner": "aiter-triton", "argv": ["tune", "s.csv"], "devices": [{"node": "n1", "device": device}],
    }  # fmt: skip
    (run / "provenance.json").write_text(json.dumps(document))
    found = published(run, "--onto", root)
    path = f"aiter/ops/triton/configs/gemm/{own}"
    assert found["files"] == {path: {"buckets": 1}}
    assert git(root, "diff", "--name-only", "main", found["branch"]).split() == [path]
    assert found["title"] == "[Triton/Gluon] [Config] Tune llama Triton GEMM-A16W16 GEMMs for gfx950"
    body = Path(found["text"]).read_text()
    assert "| 64x512x1024 | 20.00 | 15.00 | 1.333x |  |" in body
    assert "| GPU | AMD Instinct MI355X |" in body
    assert not found["missing"]


def test_verify_runs_on_nodes_and_its_result_counts(
    tmp_path: Path, aiter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def verify(words: list[str], rows: Path, log: Path) -> tuple[bool, str]:
        asked.append((words, rows.read_text(), log.name))
        return False, "n1: 1 of 2 rows used and right"

    monkeypatch.setattr(publishing, "run_verify", verify)
    code, out, _ = publish(table(tmp_path, *ROWS[:2]), "--onto", aiter, "-i", tmp_path / "inv.yaml")
    ((words, rows, log),) = asked
    assert (code, words, log) == (1, ["-i", str(tmp_path / "inv.yaml")], "run_config.a4w4_blockscale.log")
    assert sorted(rows.splitlines()[1:]) == sorted(ROWS[:2])
    assert "--run_config, a4w4_blockscale: n1: 1 of 2 rows used and right" in out


def cells(**more: Any) -> dict[str, str]:
    return dict(zip(A4W4.tuned_header, line(A4W4, **{"M": 1, "kernelName": ASM, **more}).split(","), strict=True))


def settled(row: dict[str, str], owner: dict[str, str]) -> Judged:
    old = incumbent(owner, float(owner["us"]), A4W4.name, "aiter/configs/x.csv", 7)
    pool = NewcomerPool(A4W4, lambda place: old, 0.05)
    pool.take([row])
    (found,) = publishing.settle(pool, RowRules(A4W4, A4W4.tuned_header))
    return found


def test_what_stays_out() -> None:
    same = settled(cells(us=1.0), owner=cells(us=10.0))
    assert (same.action, same.why) == ("kept", "its kernel is the row's already")
    untimed = settled(cells(us=1.0), owner=cells(us=0.0, kernelName=CK))
    assert (untimed.action, untimed.why) == ("kept", "aiter/configs/x.csv:7 has the key, and no time to compare with")
    bad = settled(cells(us=1.0, kernelName=""), owner=cells(us=10.0, kernelName=CK))
    assert (bad.action, bad.why) == ("refused", "kernelName is empty: AITER has nothing to call")
