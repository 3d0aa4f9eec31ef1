"""`gemmfleet configs` as a user runs it; the compiler is replaced by a stand-in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.configs import aiter as merging
from orchestrator.configs import check as checking
from orchestrator.configs.check import Compiled, check, chips_of
from orchestrator.errors import InputError
from orchestrator.image import build
from tests.support.config_tree import operator, resolved, tree, values, winners

FILES = {
    "gemm/gfx950-GEMM-A16W16.json": {"M_LEQ_64": values(32), "any": values(128)},
    "gemm/gfx950-GEMM-A16W16-N=512-K=1024.json": {"M_LEQ_64": values(7), "any": values(9)},
    "gemm/gfx950-BATCHED_GEMM-A16W16.json": {"any": values(1)},
    "gemm/gfx942-GEMM-A8W8.json": {"any": values(1)},
    "gemm/gluon/gfx950-GEMM-A8W8.json": {"any": {"x": 1}},
}
FACTS = {7: {"spills": 30, "vgprs": 256, "lds": 1000}, 9: {"lds": 163841}, 32: {"error": "CompilationError: no"}}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tree(tmp_path / "tree", FILES)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> list[Compiled]:
    """Configs that were given to be compiled; BLOCK_SIZE_M says what comes of it."""
    given: list[Compiled] = []

    def compile_all(
        root: Path, gfx: str, buckets: Sequence[Compiled], progress: Callable[[int, int], None]
    ) -> list[Compiled]:
        given.extend(buckets)
        return [replace(b, **FACTS.get(b.values["BLOCK_SIZE_M"], {"vgprs": 128})) for b in buckets]  # type: ignore[arg-type]

    monkeypatch.setattr(checking, "_compile", compile_all)
    return given


def run(*args: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["configs", *args])
    return done.exit_code, done.output


def test_every_bucket_is_compiled_for_the_last_m_that_it_serves(root: Path, compiler: list[Compiled]) -> None:
    check(root, "gfx950")
    assert [(Path(c.path).name, c.bucket, c.shape) for c in compiler] == [
        ("gfx950-BATCHED_GEMM-A16W16.json", "any", (8192, 8192, 8192, 16)),
        ("gfx950-GEMM-A16W16-N=512-K=1024.json", "M_LEQ_64", (64, 512, 1024, None)),
        ("gfx950-GEMM-A16W16-N=512-K=1024.json", "any", (8192, 512, 1024, None)),
        ("gfx950-GEMM-A16W16.json", "M_LEQ_64", (64, 8192, 8192, None)),
        ("gfx950-GEMM-A16W16.json", "any", (8192, 8192, 8192, None)),
    ]


def test_a_table_and_exit_code_one_on_errors(root: Path, compiler: list[Compiled]) -> None:
    code, text = run("check", "--build", str(root), "--gfx", "gfx950", "--family", "a16w16")
    assert code == 1
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "gfx950: 2 files, 4 buckets compiled, 1 with spills"
    assert "error compile gfx950-GEMM-A16W16.json:2 M_LEQ_64 does not compile: CompilationError: no" in lines
    needs = "needs 163,841 B of LDS, the chip has 163,840: it cannot be launched"
    assert f"error lds gfx950-GEMM-A16W16-N=512-K=1024.json:14 any 0 None 163841 {needs}" in lines
    assert "warning spills gfx950-GEMM-A16W16-N=512-K=1024.json:2 M_LEQ_64 30 256 1000 spills 30 registers" in lines
    assert lines[-1] == "2 errors, 1 warning"


def test_lint_alone_reads_every_chip(root: Path) -> None:
    assert chips_of(root) == ["gfx942", "gfx950"]
    code, text = run("check", "--build", str(root), "--lint-only")
    assert (code, text.splitlines()[-1]) == (0, "0 errors, 0 warnings")
    assert "gfx942: 1 file, 0 buckets compiled, 0 with spills" in text


def test_without_a_compiler_the_way_out_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"install gemmfleet\[triton,torch\] into this Python, or give --lint-only"):
        check(root, "gfx950")


def test_a_package_that_aiter_imports_and_that_is_missing_is_one_error(root: Path) -> None:
    wrapper = root / "aiter/ops/triton/gemm/basic/gemm_a16w16.py"
    wrapper.parent.mkdir(parents=True, exist_ok=True)
    wrapper.write_text("import no_such_package\n")
    with pytest.raises(InputError) as e:
        check(root, "gfx950")
    assert e.value.faults == [
        "AITER's Triton modules cannot be imported on this machine: no module no_such_package:"
        " install gemmfleet[triton,torch] into this Python, or give --lint-only"
    ]


@pytest.mark.parametrize(
    ("args", "fault"),
    [
        (("--family", "fmoe"), "has no Triton configs; there are a16w16"),
        (("--shape", "M=3"), "give N=1280,K=8192"),
        (("--shape", "N=x"), "give N=1280,K=8192"),
    ],
)
def test_a_mistake_is_one_line(root: Path, args: tuple[str, ...], fault: str) -> None:
    done = CliRunner().invoke(app, ["configs", "check", "--build", str(root), *args])
    assert fault in str(done.exception)


def test_an_image_is_read_as_a_folder_is(root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, Path | None, tuple[str, ...]]] = []

    def copied(image: str, folder: Path, inventory: Path | None, parts: tuple[str, ...]) -> None:
        asked.append((image, inventory, parts))
        shutil.copytree(root, folder, dirs_exist_ok=True)

    monkeypatch.setattr(build, "take_out", copied)
    inventory = tmp_path / "inv.yaml"
    args = ("check", "--build", "rocm/aiter:1", "-i", str(inventory), "--gfx", "gfx950", "--lint-only")
    code, text = run(*args)
    assert (code, text.splitlines()[0]) == (0, "gfx950: 4 files, 0 buckets compiled, 0 with spills")
    assert asked == [("rocm/aiter:1", inventory, build.TRITON)]


def test_a_folder_without_configs_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["configs", "check", "--build", str(tmp_path)])
    assert "holds no Triton GEMM configs" in str(done.exception)


def test_merge_and_undo_say_what_they_did(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "run_trial", resolved)
    operator(root, "fused_gemm_a16w16_quant_x")
    own = "gfx950-GEMM-A16W16-N=64-K=64.json"
    folder = winners(tmp_path / "run", {own: {"M_LEQ_64": values(16)}}, [{"N": 64, "K": 64}])
    code, text = run("merge", str(folder), "--into", str(root))
    assert code == 0
    assert f"configs/gemm/{own}: M_LEQ_64 (new; other buckets copied from gfx950-GEMM-A16W16.json)" in text
    assert "read by fused_gemm_a16w16_quant_x as well" in text
    assert "proven by a stand-in: 24 lookups as planned, neighbours as before" in text
    assert f"configs undo {root} takes it back" in text
    code, text = run("undo", str(root), "--json")
    assert json.loads(text)["removed"] == [f"aiter/ops/triton/configs/gemm/{own}"]
    code, text = run("merge", str(folder), "--into", str(root), "--json")
    assert json.loads(text)["changes"][0]["buckets"] == ["M_LEQ_64"]
    code, text = run("undo", str(root))
    assert text.splitlines()[-1] == "  older merges left: 0"
