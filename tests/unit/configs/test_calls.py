"""Calls of AITER's loader found in a tree's modules, and the operators that read a kind's files by them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from orchestrator.configs.aiter import AiterTree
from tests.support.config_tree import operator, tree, values
from worker.triton_configs.kinds import BY_NAME, KINDS, loader_calls, readers
from worker.triton_configs.resolve import TRITON

ANY = {"any": values(1)}
FILES = {f"gemm/gfx950-{c}.json": ANY for c in ("GEMM-A16W16", "GEMM-A8W8", "GEMM-A8W8_BLOCKSCALE")}


def found(code: str) -> list[tuple[str, str]]:
    return [(call.function, call.config) for call in loader_calls(ast.parse(code))]


@pytest.mark.parametrize(
    ("argument", "pattern"),
    [
        ('"GEMM-A8W8"', r"GEMM\-A8W8"), ('f"GEMM-A8W8{suffix}"', r"GEMM\-A8W8.*"),
        ('"A" if shuffle else "B"', "(?:A|B)"), ("name", r"(?:A|B_.*)"), ("given", ".*"), ("again", ".*"),
    ],
)  # fmt: skip
def test_a_name_is_followed_within_its_function(argument: str, pattern: str) -> None:
    code = f"""
def f(M, N, K, given, shuffle, suffix):
    name = "A"
    if shuffle:
        name = f"B_{{suffix}}"
    again = again + suffix
    return get_gemm_config({argument}, M, N, K)
"""
    assert found(code) == [("f", pattern)]


def test_bounds_and_backend_are_those_of_the_call() -> None:
    code = """
def f(M, b):
    get_gemm_config("A", M, bounds=(1, 2), backend="gluon")
    get_gemm_config("B", M, bounds=b)
"""
    assert [(c.bounds, c.backend) for c in loader_calls(ast.parse(code))] == [((1, 2), "gluon"), ((), None)]


def test_a_wrapper_reads_what_it_takes_from_its_kernels_module(tmp_path: Path) -> None:
    root = operator(operator(tmp_path, "fused_one"), "fused_two", "GEMM-A8W8")
    (root / TRITON / "broken.py").write_text("get_gemm_config(")
    tuning = root / TRITON / "utils" / "tuning.py"
    tuning.parent.mkdir()
    tuning.write_text((root / TRITON / "gemm/fused/fused_one.py").read_text())
    assert readers(root / TRITON, "GEMM-A16W16") == {"gemm.fused.fused_one": {None}}


class TestOperators:
    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        return tree(tmp_path, FILES)

    def test_those_that_the_tuner_can_call_and_others(self, root: Path) -> None:
        operator(operator(root, "fused_gemm_a16w16_quant_x"), "fused_new")
        assert AiterTree(root, "gfx950").operators(BY_NAME["a16w16"]) == {
            "fused_gemm_a16w16_quant_x": True, "fused_new": False,
        }  # fmt: skip

    def test_a_tree_without_the_operator_has_none_that_reads(self, root: Path) -> None:
        assert AiterTree(root, "gfx950").operators(BY_NAME["a16w16"]) == {}

    def test_before_the_folders_of_gemm_it_has_the_same_name(self, root: Path) -> None:
        operator(root, "fused_gemm_a16w16_quant_x")
        wrapper = root / TRITON / "gemm/fused/fused_gemm_a16w16_quant_x.py"
        wrapper.rename(root / TRITON / wrapper.name)
        assert AiterTree(root, "gfx950").operators(BY_NAME["a16w16"]) == {"fused_gemm_a16w16_quant_x": True}

    def test_gluons_kernel_reads_them_only_where_it_has_none_of_its_own(self, root: Path) -> None:
        gluon = root / TRITON / "gluon" / "other.py"
        gluon.parent.mkdir(parents=True)
        gluon.write_text('def f(M, N, K):\n    return get_gemm_config("GEMM-A8W8", M, N, K, backend="gluon")\n')
        kind = BY_NAME["a8w8"]
        assert AiterTree(root, "gfx950").operators(kind) == {"gluon.other": False}
        tree(root, {"gemm/gluon/gfx950-GEMM-A8W8.json": ANY})
        assert AiterTree(root, "gfx950").operators(kind) == {}
        tree(root, {"gfx942/triton/gemm/gemm_a8w8/DEFAULT.json": ANY})
        assert AiterTree(root, "gfx942").operators(kind) == {}, "there is no file that it could read"


def test_what_is_known_of_an_operator_is_of_a_kind_that_is_tuned() -> None:
    callers = [c for kind in KINDS for c in kind.callers]
    assert len({(c.module, c.function) for c in callers}) == len(callers)
    assert all(c.module.startswith("aiter.ops.triton.") for c in callers)
