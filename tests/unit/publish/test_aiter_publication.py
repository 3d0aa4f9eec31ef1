"""`gemmfleet publish`: a branch in a small checkout of AITER's layout, made, checked, and made again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.configs import aiter_tree as merging
from orchestrator.configs.aiter_trial import LoaderArguments, LookupTrial
from orchestrator.errors import InputError
from orchestrator.paths import RunConfig, RunPaths
from orchestrator.publish.aiter_checks import CHECKS, FOLDER, MAX_LINE, run_check, run_verify
from orchestrator.publish.checkout import Checkout
from orchestrator.results.export import export, make_provenance
from orchestrator.results.run_results import RunResults
from tests.kits.results import DEVICE, Run, ended, row, started
from tests.paths import ROOT
from tests.standins.aiter import config_files
from tests.standins.aiter.checkout import SKIPPED, checkout, commit, git, show
from tests.standins.aiter.kernel_lists import ASM, CK, CK2, TILE
from tests.support.tuned_tables import A4W4, BLOCKSCALE, line, text
from worker.protocol import record

MODEL = "aiter/configs/model_configs/llama_a4w4_blockscale_tuned_gemm.csv"
SHAPES = MODEL.replace("tuned", "untuned")
MAIN = f"aiter/configs/{A4W4.tuned_csv}"
OTHER = "model_configs/other_a4w4_blockscale_tuned_gemm.csv"
BRANCH = "gemmfleet/llama-a4w4_blockscale"
OF_RUN = "aiter/configs/model_configs/a8w8_blockscale_tuned_gemm_llama.csv"
DIGEST, COMMIT, P2 = "sha256:" + "ab" * 32, "e4048607a5" + "0" * 30, f"{TILE}_p2"


@pytest.fixture
def aiter(tmp_path: Path) -> Path:
    """A checkout in which one key is in the shared table, and one in another model's; of the other family, the shape
    M=2 with a kernel that the run measured as well."""
    owned = line(BLOCKSCALE, M=2, libtype="cktile", kernelName=P2, kernelId=1, us=6.0)
    return checkout(tmp_path / "aiter", {
        A4W4.tuned_csv: text(A4W4, line(A4W4, M=900, kernelName=CK), line(A4W4, M=910, kernelName=CK)),
        OTHER: text(A4W4, line(A4W4, M=901, kernelName=CK, us="20.50"), line(A4W4, M=902, kernelName=CK)),
        BLOCKSCALE.tuned_csv: text(BLOCKSCALE, owned),
    })  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of AITER's tuner: three shapes with their candidates, on a node that says what it is."""
    folder = tmp_path / "runs" / "r1"
    folder.mkdir(parents=True)
    facts = {"device": "AMD Instinct MI355X", "rocm": "7.1.0", "aiter": {"commit": COMMIT, "image": DIGEST}}
    device, clocks = {**DEVICE, **facts}, {"clock_mhz": 2100, "memory_clock_mhz": 2000}
    with Run(folder, groups=((1, 2, 3),)) as r:
        with r.ledger.transaction():
            r.ledger.set_meta("tuner", "aiter")
        r.says(
            record("worker_started", 0.5, info={"pid": 7, "image": DIGEST}),
            record("tuner_ready", 0.6, tuner="aiter", device=device, seconds=0.1),
        )
        r.send("g0001-1")
        r.says(started("g0001-1") | {"device": device, "conditions": clocks})
        for shape in (1, 2, 3):
            kernel = {"kernelName": TILE, "libtype": "cktile", "kernelId": 0}
            r.says(
                record("shape_started", 1.0, attempt="g0001-1", shape=shape),
                row("row", "g0001-1", shape, us=8.0, **kernel),
                row("row", "g0001-1", shape, us=9.0, **{**kernel, "kernelName": P2, "kernelId": 1}),
                row("row", "g0001-1", shape, us=-1, status="wrong", **{**kernel, "kernelName": "x", "kernelId": 9}),
                row("shape_tuned", "g0001-1", shape, us=7.5, **kernel),
            )
        r.says(ended("g0001-1") | {"conditions": {"clock_mhz": 2400}})
        argv = ["tune", "llm shapes.csv", "--tuner", "aiter", "-i", "fleet.yaml"]
        results = RunResults.read(r.ledger)
        export(results, RunPaths(folder), make_provenance(results, RunConfig("r1", 0.0, argv, "", "", "", "", "", "")))
    return folder


def table(folder: Path, *lines: str) -> Path:
    path = folder / "mine_a4w4_blockscale_tuned_gemm.csv"
    path.write_text(text(A4W4, *lines))
    return path


def publish(*words: object) -> tuple[int, str]:
    """(exit code, output); a user's mistake raises."""
    done = CliRunner().invoke(app, ["publish", *map(str, words), "--model", "llama"])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout


def published(*words: object) -> dict[str, Any]:
    """The document, with the text of the pull request as `body`."""
    code, out = publish(*words, "--json")
    document: dict[str, Any] = json.loads(out)
    assert (code == 0) == document["ok"]
    return {**document, "body": Path(document["text"]).read_text()}


ROWS = (
    line(A4W4, M=8, N=128, kernelName=ASM), line(A4W4, M=16, kernelName=ASM),
    line(A4W4, M=4, kernelName=CK2, kernelId=1),
    line(A4W4, M=901, kernelName=ASM, us=5.0), line(A4W4, M=900, kernelName=ASM, us=9.9),
)  # fmt: skip


def test_new_rows_get_files_of_the_model_and_a_faster_row_is_edited_where_it_is(tmp_path: Path, aiter: Path) -> None:
    (aiter / MAIN).write_text("work of mine")
    hook = aiter / ".git" / "hooks" / "post-commit"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    hook.chmod(0o755)
    found = published(table(tmp_path, *ROWS), "--onto", aiter)
    assert found["branch"] == BRANCH
    assert show(aiter, BRANCH, MODEL) == text(
        A4W4, line(A4W4, M=4, kernelName=CK2, kernelId=1), line(A4W4, M=16, kernelName=ASM),
        line(A4W4, M=8, N=128, kernelName=ASM),
    )  # fmt: skip
    assert show(aiter, BRANCH, SHAPES) == "M,N,K\n4,64,128\n16,64,128\n900,64,128\n901,64,128\n8,128,128\n"
    changed = git(aiter, "diff", "--unified=0", "main", BRANCH, "--", f"aiter/configs/{OTHER}").splitlines()[5:]
    old, new = line(A4W4, M=901, kernelName=CK, us="20.50"), line(A4W4, M=901, kernelName=ASM, us=5.0)
    assert changed == [f"-{old}", f"+{new}"]
    assert git(aiter, "diff", "--name-only", "main", BRANCH).split() == [MODEL, SHAPES, f"aiter/configs/{OTHER}"]
    assert {r["outcome"]: r["why"] for r in found["rows"]} == {
        "added": "the table had no row of this key",
        "edited": "faster by 75.6%",
        "kept": "faster by 1.0%, which is not more than the margin of 3.0%",
    }
    assert [(r["rebuild"], r["outcome"]) for r in found["rows"] if r["key"]["M"] == 4] == [(True, "added")]
    assert [*found["checks"].values()] == ["safe in this branch, over all tables that it merges", "passes", "passes"]
    # nothing else of the checkout moves
    assert (aiter / MAIN).read_text() == "work of mine"
    assert git(aiter, "branch", "--show-current") == "main\n"
    assert git(aiter, "worktree", "list").count("\n") == 1
    assert not (tmp_path / "ran").exists()
    subject = "A Person|[Config] Tune llama a4w4_blockscale (fp4) GEMMs for gfx950"
    assert [x for x in git(aiter, "log", "--format=%an|%s|%b", f"main..{BRANCH}").split("\n") if x] == [
        f"{subject}: rows that other files own|Published-by: gemmfleet", f"{subject}|Published-by: gemmfleet",
    ]  # fmt: skip


def test_each_branch_has_a_text_of_its_own(tmp_path: Path, aiter: Path) -> None:
    mine = table(tmp_path, *ROWS)
    texts = {name: published(mine, "--onto", aiter, *words)["text"] for name, words in BRANCHES.items()}
    assert texts == {
        "llama": str(tmp_path / f"{mine.stem}.publish" / f"llama-{A4W4.name}" / "pull-request.md"),
        "other": str(tmp_path / f"{mine.stem}.publish" / "fix-x" / "pull-request.md"),
    }


BRANCHES: dict[str, tuple[str, ...]] = {"llama": (), "other": ("--branch", "fix/x")}


KILLED = """
import os, signal, sys
from pathlib import Path
from orchestrator.publish.checkout import Checkout
with Checkout(Path(sys.argv[1])).worktree("HEAD"):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_worktrees_of_killed_processes_are_removed_and_others_stay(
    tmp_path: Path, aiter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (scratch := tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    here = Checkout(aiter)
    for is_folder_gone in (False, True):
        subprocess.run([sys.executable, "-c", KILLED, aiter], cwd=ROOT, env={**os.environ, "TMPDIR": str(scratch)})
        (left,) = scratch.iterdir()
        if is_folder_gone:
            shutil.rmtree(left)  # as after a reboot
        with here.worktree("HEAD") as living:
            with here.worktree("HEAD"):
                assert here.git("worktree", "list", "--porcelain").count("worktree ") == 3
            assert living.is_dir()
            assert not left.exists()
    assert here.git("worktree", "list", "--porcelain").count("worktree ") == 1
    assert [*scratch.iterdir()] == []


def test_rows_that_must_not_be_served_are_refused_by_name(tmp_path: Path, aiter: Path) -> None:
    rows = (
        line(A4W4, M=1, kernelName=ASM), line(A4W4, M=2, kernelName=CK + "x"), line(A4W4, M=3, kernelName="Cijk_A"),
        line(A4W4, M=5, kernelName="torch_lut256_t2"), line(A4W4, M=6, kernelName=ASM, cu_num=250),
        line(A4W4, M=7, kernelName=ASM, errRatio=0.2), line(A4W4, M=8, kernelName=ASM, us=-1),
        line(A4W4, M=9, kernelName=""), line(A4W4, M=910, kernelName=CK, us=1.0),
    )  # fmt: skip
    found = published(table(tmp_path, *rows), "--onto", aiter)
    refused = {r["key"]["M"]: r["why"] for r in found["rows"] if r["outcome"] == "refused"}
    assert sorted(refused) == [2, 3, 5, 6, 9]
    assert "hipBLASLt" in refused[3]
    assert [r["why"] for r in found["rows"] if r["outcome"] == "kept"] == ["its kernel is the row's already"]
    assert show(aiter, BRANCH, MODEL).count("\n") == 2
    assert "its us is -1" in found["body"]
    with pytest.raises(InputError, match=r"(?s)nothing to publish onto .*lists no kernel"):
        publish(table(tmp_path, rows[1]), "--onto", aiter, "--branch", "b2")
    assert "b2" not in git(aiter, "branch")


def test_refresh_makes_the_branch_again_on_a_newer_main(tmp_path: Path, aiter: Path) -> None:
    """#5072: others add the same keys meanwhile; a rebase by text would leave them twice."""
    mine = table(tmp_path, *ROWS)
    published(mine, "--onto", aiter)
    with pytest.raises(InputError, match="--refresh makes it again on the newer base"):
        publish(mine, "--onto", aiter)
    newer = "aiter/configs/model_configs/newer_a4w4_blockscale_tuned_gemm.csv"
    there = text(A4W4, line(A4W4, M=7, kernelName=CK), line(A4W4, M=8, N=128, kernelName=CK, us=50.0))
    commit(aiter, "newer", {
        newer: text(A4W4, line(A4W4, M=16, kernelName=CK), line(A4W4, M=4, kernelName=CK, us=1.0)),
        MODEL: there, SHAPES: "M,N,K\n7,64,128\n",
    })  # fmt: skip
    found = published(mine, "--onto", aiter, "--refresh")
    assert git(aiter, "merge-base", "main", BRANCH).strip() == found["base"] == git(aiter, "rev-parse", "main").strip()
    assert {r["key"]["M"]: r["outcome"] for r in found["rows"]} == {
        4: "kept", 16: "kept", 8: "edited", 900: "kept", 901: "edited",
    }  # fmt: skip
    assert [x.split(",")[2] for x in show(aiter, BRANCH, MODEL).splitlines()] == ["M", "7", "8"]
    assert found["checks"]["`db check --build` of gemmfleet, a4w4_blockscale"].startswith("safe in this branch")
    git(aiter, "switch", "-q", BRANCH)
    with pytest.raises(InputError, match="is checked out; switch to another branch"):
        publish(mine, "--onto", aiter, "--refresh", "--base", "main")
    tip = commit(aiter, "by hand", {"notes.txt": "x"})
    git(aiter, "switch", "-q", "main")
    with pytest.raises(InputError, match=r"has commits that publish did not make \(\w+ by hand\)"):
        publish(mine, "--onto", aiter, "--refresh")
    assert git(aiter, "rev-parse", BRANCH).strip() == tip


@pytest.mark.parametrize("is_behind", [False, True])
def test_a_branch_that_publish_did_not_make_is_not_made_again(tmp_path: Path, aiter: Path, is_behind: bool) -> None:
    """The base has all commits of main, so none would be lost; still main is not a branch for a pull request."""
    git(aiter, "switch", "-q", "-c", "feature")
    if is_behind:
        commit(aiter, "by hand", {"notes.txt": "x"})
    before = git(aiter, "rev-parse", "main")
    with pytest.raises(InputError, match=r"main is not a branch that publish made \(its last commit: \w+ base\)"):
        publish(table(tmp_path, *ROWS), "--onto", aiter, "--branch", "main", "--refresh")
    assert git(aiter, "rev-parse", "main") == before


def test_a_failure_that_the_base_has_is_told_from_a_new_one(tmp_path: Path, aiter: Path) -> None:
    commit(aiter, "broken", {MAIN: text(A4W4, line(A4W4, M=1, us=0, kernelName=CK))})
    found = published(table(tmp_path, *ROWS[:2]), "--onto", aiter)
    assert found["checks"]["`test_csv_validation`"].startswith("fails as on the base: test_tables")
    both = "test_config_shape_collision.py"
    refusing = "import os, unittest\nclass Test(unittest.TestCase):\n    def test_new(self):\n"
    refusing += f"        self.assertFalse(os.path.exists({MODEL!r}))\n"
    commit(aiter, "strict", {f"op_tests/tuning_tests/{both}": refusing})
    code, out = publish(table(tmp_path, *ROWS[:2]), "--onto", aiter, "--branch", "b2")
    assert code == 1
    assert "test_config_shape_collision: FAILS: test_new" in out
    assert "b2" in git(aiter, "branch")  # it is left, to be looked at


def test_a_check_that_cannot_run_is_not_green(tmp_path: Path) -> None:
    root = checkout(tmp_path / "aiter", guard=SKIPPED)
    (root / "op_tests" / "tuning_tests" / "test_csv_validation.py").unlink()
    commit(root, "older")
    checks = published(table(tmp_path, *ROWS[:2]), "--onto", root)["checks"]
    assert checks["`test_config_shape_collision`"] == (
        "not run: it skips itself: aiter.jit.core not importable: No module named 'torch'"
    )
    assert checks["`test_csv_validation`"] == "not run: this AITER has no such check"


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("--onto", "{tmp}/none"), "did not end|No such file|cannot change to"),
        (("--onto", "{tmp}"), "not a git repository"),
        (("--onto", "{tmp}/aiter", "--base", "v9"), "has no commit 'v9'; fetch it there first"),
        (("--onto", "{tmp}/aiter", "--branch", "a..b"), "not a valid branch name; name another with --branch"),
        (("--onto", "{tmp}/aiter", "--branch", "main/x"), "main/x cannot be beside the branch main; name another with"),
        (("--onto", "{tmp}/aiter", "--refresh"), "is not a branch there"),
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


def test_triton_configs_become_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def trial(root: Path, arch: str, calls: Sequence[LoaderArguments], *, alone: bool) -> LookupTrial:
        return config_files.resolved(root, arch, calls)

    monkeypatch.setattr(merging, "run_trial", trial)
    root = checkout(tmp_path / "aiter")
    default = "gemm/gfx950-GEMM-A16W16.json"
    config_files.tree(root, {default: {"M_LEQ_64": config_files.values(32), "any": config_files.values(128)}})
    commit(root, "configs")
    own = "gfx950-GEMM-A16W16-N=512-K=1024.json"
    run = config_files.winners(tmp_path / "r1", {own: {"M_LEQ_64": config_files.values(16)}}, [{}])
    device = {"device": "AMD Instinct MI355X", "versions": {"rocm": "7.1"}, "aiter": {"commit": "abc"}}
    devices = [{"node": "n1", "device": device}]
    document = {"run": "r1", "tuner": "aiter-triton", "argv": ["tune", "s.csv"], "devices": devices}
    (run / "provenance.json").write_text(json.dumps(document))
    found = published(run, "--onto", root)
    path = f"aiter/ops/triton/configs/gemm/{own}"
    assert (found["files"], found["missing"]) == ({path: {"buckets": 1}}, [])
    assert git(root, "diff", "--name-only", "main", found["branch"]).split() == [path]
    assert found["title"] == "[Triton/Gluon] [Config] Tune llama Triton GEMM-A16W16 GEMMs for gfx950"
    assert "| 64x512x1024 | 20.00 | 15.00 | 1.333x |  |" in found["body"]
    assert "| GPU | AMD Instinct MI355X |" in found["body"]


def test_5500_exact_commands_rocm_gpu_and_aiter_commit(run: Path, aiter: Path) -> None:
    """The table's own figure is 6 us, of another session; in this one its kernel takes 9 us."""
    found = published(run, "--onto", aiter)
    assert found["missing"] == []
    for words in (
        "gemmfleet tune 'llm shapes.csv' --tuner aiter -i fleet.yaml",
        "| GPU | AMD Instinct MI355X |", "| chips of a8w8_blockscale | gfx950 with CU count 256 |",
        "| ROCm | 7.1.0 |", f"| AITER commit when measured | {COMMIT} |", f"| image digest | {DIGEST} |",
        "| node | n1 |", "| GPU clock (MHz) | 2100 to 2400 |", "| candidates tried | 9 |",
        "| of them without a right result | 3 |",
        f"| AITER commit that this branch is based on | {git(aiter, 'rev-parse', 'main').strip()} |",
        "| 2x64x128 | 9.00 ± 1.0 % | 7.50 ± 1.0 % | 1.200x | pair | edited: faster by 16.7% in the same profile |",
        "a8w8_blockscale: of 3 shapes of llama, 2 had no row (exact or padded M) before, and 0 have none after.",
    ):  # fmt: skip
        assert words in found["body"], words
    (edited,) = [r for r in found["rows"] if r["outcome"] == "edited"]
    assert (edited["key"]["M"], edited["before_us"], edited["after_us"], edited["paired"]) == (2, 9.0, 7.5, True)


def test_3693_no_hipblaslt_lf_line_ends_a_title_of_the_rows_dtype_and_what_is_not_recorded(
    tmp_path: Path, aiter: Path
) -> None:
    alone = tmp_path / f"x_{BLOCKSCALE.tuned_csv}"
    rows = [line(BLOCKSCALE, M=1, libtype="cktile", kernelName=TILE)]
    rows.append(line(BLOCKSCALE, M=9, libtype="hipblaslt", kernelName="Cijk_Ailk_Bljk"))
    alone.write_text(text(BLOCKSCALE, *rows).replace("\n", "\r\n"), newline="")
    found = published(alone, table(tmp_path, *ROWS[:2]), "--onto", aiter)
    assert found["branch"] == "gemmfleet/llama-a8w8_blockscale-a4w4_blockscale"
    made = show(aiter, found["branch"], OF_RUN)
    assert "Cijk" not in made
    assert "\r" not in made
    assert [r["key"]["M"] for r in found["rows"] if r["outcome"] == "refused"] == [9]
    assert found["title"] == "[Config] Tune llama a8w8_blockscale (fp8) and a4w4_blockscale (fp4) GEMMs for gfx950"
    titled = ("--onto", aiter, "--branch", "b2", "--title", "Add llama FP8 tables")
    assert published(alone, *titled)["title"] == "Add llama FP8 tables"
    assert found["missing"] == ["GPU", "ROCm", "AITER commit when measured", "run"]
    assert "| ROCm | not recorded |" in found["body"]


def test_run_config_on_nodes_is_read_from_verify_and_its_result_counts(
    tmp_path: Path, aiter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, says = run_verify(["-i", str(tmp_path / "none.yaml")], table(tmp_path, *ROWS), tmp_path / "x.log")
    assert not held
    assert says.startswith("not run: error: ")
    assert "none.yaml" in says
    rows = [{"selected": True, "verdict": "ok"}, {"selected": False, "verdict": "ok"}]
    nodes: list[dict[str, object]] = [
        {"node": "n1", "why": "", "rows": rows},
        {"node": "n2", "why": "no GPU", "rows": rows},
    ]
    nodes += [{"node": "n3", "why": "", "aiter": {"how": "the operator itself"}, "rows": rows}]
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho what AITER prints >&2\necho '{json.dumps({'nodes': nodes})}'\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    found = published(table(tmp_path, *ROWS[:2]), "--onto", aiter, "-i", tmp_path / "inv.yaml", "--no-checks")
    assert found["checks"]["`--run_config`, a4w4_blockscale"] == (
        "n1: 1 of 2 rows used and right; n2: no GPU; n3: 1 of 2 rows used and right (the operator itself)"
    )
    assert not found["ok"]
    log = Path(found["text"]).parent / "checks" / "run_config.a4w4_blockscale.log"
    assert log.read_text() == "what AITER prints\n"


def test_of_a_check_that_prints_without_measure_the_end_counts(tmp_path: Path) -> None:
    script = tmp_path / FOLDER / f"{CHECKS[0]}.py"
    script.parent.mkdir(parents=True)
    script.write_text(r"""
import os
for _ in range(20):
    os.write(2, b"FAIL: x\x1b[31m" * 100_000)
os.write(2, b"\nFAIL: test_names\n" + b"y" * 100_000 + b"\nRan 2 tests in 0.1s\n\nFAILED (failures=1)\n")
os._exit(1)
""")
    check = run_check(tmp_path, CHECKS[0], sys.executable, tmp_path, tmp_path / "log")
    assert check.failing == {"test_names"}
    assert [len(line) for line in check.tail] == [16, MAX_LINE, 19, 19]
