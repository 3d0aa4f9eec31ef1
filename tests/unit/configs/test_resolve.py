"""The config that a shape gets, in every layout that AITER had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.config_tree import FLAT, FOLDERS, NESTED, NO_FALLBACK, tree, values
from worker.triton_configs.kinds import BY_NAME
from worker.triton_configs.resolve import ResolveError, Resolver, bucket_for, ranges, read_loader

NAME = "GEMM-A16W16"
ANY = {"any": values(1)}
FOLDER = "gfx950/triton/gemm/gemm_a16w16"


def resolver(root: Path, files: dict[str, Any], loader: str = FOLDERS) -> Resolver:
    return Resolver(tree(root, files, loader), "gfx950")


class TestWhereFilesLie:
    def test_a_folder_with_a_default_counts_before_flat_files(self, tmp_path: Path) -> None:
        r = resolver(tmp_path, {f"{FOLDER}/DEFAULT.json": ANY, f"gemm/gfx950-{NAME}.json": ANY})
        assert r.place(NAME).folder == r.root / "aiter/ops/triton/configs" / FOLDER
        assert r.target(NAME, 8, 16).name == "GEMM-A16W16-N=8-K=16.json"

    def test_a_folder_without_a_default_does_not(self, tmp_path: Path) -> None:
        r = resolver(tmp_path, {f"{FOLDER}/{NAME}-N=8-K=16.json": ANY, f"gemm/gfx950-{NAME}.json": ANY})
        assert r.file_for(NAME, 8, 16) == (r.place(NAME).default, False)
        assert r.target(NAME, 8, 16).name == "gfx950-GEMM-A16W16-N=8-K=16.json"

    def test_triton_comes_before_gluon_unless_a_backend_is_named(self, tmp_path: Path) -> None:
        gluon = FOLDER.replace("triton", "gluon")
        r = resolver(tmp_path, {f"{FOLDER}/DEFAULT.json": ANY, f"{gluon}/DEFAULT.json": ANY})
        assert "/triton/gemm/" in str(r.place(NAME).folder)
        assert "/gluon/gemm/" in str(r.place(NAME, "gluon").folder)

    def test_a_backend_falls_back_to_its_flat_folder_and_then_to_all(self, tmp_path: Path) -> None:
        r = resolver(tmp_path, {f"gemm/gfx950-{NAME}.json": ANY, f"gemm/gluon/gfx950-{NAME}.json": ANY})
        assert r.place(NAME, "gluon").folder.name == "gluon"
        assert r.place(NAME, "triton").folder.name == "gemm"

    def test_an_older_nested_layout_has_no_folder_of_the_config(self, tmp_path: Path) -> None:
        r = resolver(tmp_path, {f"gfx950/triton/gemm/{NAME}.json": ANY}, NESTED)
        assert (r.loader.layout, r.loader.flat_left) == ("nested", True)
        assert r.place(NAME).folder.name == "gemm"

    def test_a_flat_loader_ignores_folders_backends_and_b(self, tmp_path: Path) -> None:
        files = {
            f"{FOLDER}/DEFAULT.json": ANY,
            f"gemm/gfx950-{NAME}.json": ANY,
            f"gemm/gfx950-{NAME}-B=2-N=8-K=16.json": ANY,
        }
        r = resolver(tmp_path, files, FLAT)
        assert r.file_for(NAME, 8, 16, 2, "gluon")[0].name == f"gfx950-{NAME}.json"
        assert r.loader.bounds == (16, 64)

    def test_flat_files_do_not_count_once_the_loader_has_forgotten_them(self, tmp_path: Path) -> None:
        r = resolver(tmp_path, {f"gemm/gfx950-{NAME}.json": ANY}, NO_FALLBACK)
        with pytest.raises(ResolveError, match="no default file for gfx950"):
            r.place(NAME)

    def test_a_tree_without_the_loader_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ResolveError, match="cannot be read"):
            read_loader(tmp_path)
        with pytest.raises(ResolveError, match="has no get_gemm_config"):
            Resolver(tree(tmp_path, {}, "def load(): ...\n"), "gfx950")


class TestTheBucket:
    def test_a_specialised_file_replaces_the_default_wholly(self, tmp_path: Path) -> None:
        own = {"M_LEQ_16": values(16), "any": values(2)}
        files = {f"gemm/gfx950-{NAME}.json": {"M_LEQ_64": values(64), **ANY}, f"gemm/gfx950-{NAME}-N=8-K=16.json": own}
        r = resolver(tmp_path, files)
        found = r.config_for("a16w16", 64, 8, 16)
        assert (found.bucket, found.values, found.specialised) == ("any", values(2), True)
        assert r.config_for("a16w16", 16, 8, 16).bucket == "M_LEQ_16"
        assert r.config_for("a16w16", 64, 8, 32).bucket == "M_LEQ_64"

    def test_a_file_of_b_comes_first_where_the_caller_gives_b(self, tmp_path: Path) -> None:
        name = "BATCHED_GEMM-A16W16"
        files = {f"gemm/gfx950-{name}{s}.json": ANY for s in ("", "-N=8-K=16", "-B=2-N=8-K=16")}
        r = resolver(tmp_path, files)
        assert "-B=2-" in r.config_for("batched_bf16", 1, 8, 16, 2).path.name
        assert r.config_for("batched_bf16", 1, 8, 16, 3).path.name == f"gfx950-{name}-N=8-K=16.json"

    def test_lower_bounds_come_first_then_the_highest_reached_then_any(self) -> None:
        config: dict[str, Any] = {"M_LEQ_16": {}, "M_LEQ_64": {}, "M_GEQ_4096": {}, "M_GEQ_256": {}, "any": {}}
        bounds = (16, 64, 256, 4096)
        given = {m: bucket_for(config, m, bounds) for m in (1, 16, 17, 65, 256, 4095, 4096)}
        assert list(given.values()) == [
            "M_LEQ_16", "M_LEQ_16", "M_LEQ_64", "any", "M_GEQ_256", "M_GEQ_256", "M_GEQ_4096",
        ]  # fmt: skip
        assert ranges(config, bounds) == {
            "M_LEQ_16": [(1, 16)], "M_LEQ_64": [(17, 64)], "any": [(65, 255)], "M_GEQ_256": [(256, 4095)],
            "M_GEQ_4096": [(4096, None)],
        }  # fmt: skip

    def test_a_bucket_of_no_bound_is_never_found(self) -> None:
        assert bucket_for({"M_LEQ_31": {}, "any": {}}, 20, (16, 64)) == "any"
        with pytest.raises(ResolveError, match="no bucket covers M=65"):
            bucket_for({"M_LEQ_64": {}}, 65, (16, 64))
        assert ranges({"M_LEQ_64": {}}, (16, 64))[""] == [(65, None)]

    def test_bounds_are_those_of_the_call_in_the_tree(self, tmp_path: Path) -> None:
        kind = BY_NAME["a16w16"]
        r = resolver(tmp_path, {})
        assert r.bounds(kind) == (16, 64, 256, 4096)
        module = tmp_path / "aiter/ops/triton/_triton_kernels/gemm/basic/gemm_a16w16.py"
        module.parent.mkdir(parents=True)
        module.write_text('def f(M):\n    return get_gemm_config("GEMM-A16W16", M, bounds=(8, 320))\n')
        assert Resolver(tmp_path, "gfx950").bounds(kind) == (8, 320)
