"""Faults of config files by AITER's own rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.configs.check import lint, lint_content, outliers
from tests.support.config_tree import tree, values
from worker.text import Finding
from worker.triton_configs.kinds import BY_NAME
from worker.triton_configs.resolve import Resolver, parse, written

BOUNDS = (16, 64, 256)
ANY = {"any": values()}
NAME = "GEMM-A16W16"
FOLDER = "gfx950/triton/gemm/gemm_a16w16"


def content(document: dict[str, Any], kind: str = "a16w16", arch: str = "gfx950") -> list[tuple[str, str, str]]:
    found = lint_content(parse(written(document)), BY_NAME[kind], BOUNDS, arch)
    return [(f.level, f.rule, f.bucket) for f in found]


def of_tree(root: Path, files: dict[str, Any], arch: str = "gfx950") -> list[Finding]:
    return lint(Resolver(tree(root, files), arch))


class TestContent:
    def test_a_good_file_has_no_finding(self) -> None:
        assert not content({"M_LEQ_16": values(), **ANY})

    def test_buckets_that_no_m_finds(self) -> None:
        found = content({"M_LEQ_31": values(), "M_LEQ_256": values(), "M_GEQ_16": values(), **ANY})
        assert found == [("error", "unreachable", "M_LEQ_31")]
        assert content({"M_LEQ_256": values(), "M_GEQ_64": values(), "M_GEQ_16": values(), **ANY}) == [
            ("error", "unreachable", "M_GEQ_16")
        ]

    def test_sections_of_another_scheme_are_not_looked_for_and_notes_are_fine(self) -> None:
        text = json.dumps({"small": {}, "_note": "tuned by hand", "any": values()})
        found = lint_content(parse(text), BY_NAME["a16w16"], BOUNDS, "gfx950")
        assert [(f.rule, f.text) for f in found] == [("unreachable", "small is no bucket, so nobody looks for it")]

    def test_any_is_missing(self) -> None:
        assert content({"M_LEQ_64": values()}) == [("error", "any", "")]
        assert content({"M_LEQ_64": values(), "M_GEQ_64": values()}) == [("warning", "any", "")]

    def test_kpack_is_allowed_on_gfx942_alone(self) -> None:
        bucket = {"any": values(kpack=1)}
        assert content(bucket) == [("error", "kpack", "any")]
        assert content(bucket, arch="gfx1250") == [("error", "kpack", "any")]
        assert not content(bucket, arch="gfx942")

    def test_keys_that_are_missing(self) -> None:
        without = {k: v for k, v in values().items() if k != "NUM_KSPLIT"}
        assert content({"any": without}) == [("warning", "required", "any")]
        assert not content({"any": without}, "a16w16_gated")
        assert content({"any": values()}, "a16w16_gated") == [("error", "refused", "any")]
        del without["BLOCK_SIZE_K"]
        assert content({"any": without}) == [("error", "required", "any")]
        assert not content({"any": {"BLOCK_M": 16, "kernel_type": "compute_bound"}})

    def test_options_of_amd_alone_are_refused_elsewhere(self) -> None:
        assert content({"any": values()}, arch="90") == [("error", "refused", "any")]
        plain = {k: v for k, v in values().items() if k not in ("waves_per_eu", "matrix_instr_nonkdim")}
        assert not content({"any": plain}, arch="90")

    def test_what_a_wrapper_asserts(self) -> None:
        assert content({"any": values(BLOCK_SIZE_K=64)}, "a8w8_blockscale") == [("error", "block_k", "any")]
        good = {"M_LEQ_16": values(16), "any": values(32)}
        bounds = (16, 31, 64)
        kind = BY_NAME["a4w4_preshuffle"]
        shuffled = lint_content(parse(written(good)), kind, bounds, "gfx950")
        assert [(f.bucket, f.text) for f in shuffled] == [
            (
                "any",
                "BLOCK_SIZE_M is 32 for M = 17..: the wrapper accepts at most 16 below M = 32,"
                " and at least 32 from there",
            )
        ]
        assert not lint_content(parse(written({**good, "M_LEQ_31": values(16)})), kind, bounds, "gfx950")

    def test_a_bucket_unlike_its_neighbours(self) -> None:
        odd = values(16, BLOCK_SIZE_N=256, num_warps=1)
        found = list(outliers({"M_LEQ_16": values(16), "M_LEQ_64": odd, "any": values(32)}))
        steps = "4 steps from its neighbours, which are 1 apart: BLOCK_SIZE_N 256 between 64, num_warps 1 between 4"
        assert found == [("M_LEQ_64", steps)]
        assert not list(outliers({"M_LEQ_16": values(16), "M_LEQ_64": odd, "any": odd}))


class TestPlaces:
    def test_a_family_split_over_two_layouts(self, tmp_path: Path) -> None:
        found = of_tree(tmp_path, {f"{FOLDER}/DEFAULT.json": ANY, f"gemm/gfx950-{NAME}-N=8-K=16.json": ANY})
        assert [(f.level, f.rule, Path(f.path).name) for f in found] == [
            ("error", "split", f"gfx950-{NAME}-N=8-K=16.json")
        ]

    def test_specialised_files_without_a_default(self, tmp_path: Path) -> None:
        found = of_tree(tmp_path, {f"{FOLDER}/{NAME}-N=8-K=16.json": ANY})
        assert [(f.level, f.rule) for f in found] == [("error", "default")]

    def test_files_of_a_backend_count(self, tmp_path: Path) -> None:
        files = {f"gemm/gfx950-{NAME}.json": ANY, f"gemm/gluon/gfx950-{NAME}.json": {"any": {"x": 1}}}
        assert not of_tree(tmp_path, files)

    @pytest.mark.parametrize(
        ("name", "level", "text"),
        [
            (f"{FOLDER}/gfx950-{NAME}-N=8-K=16.json", "error", "the folder names the chip already"),
            (f"{FOLDER}/{NAME}-K=16-N=8.json", "error", "gemm_a16w16 never looks for the suffix K=16-N=8"),
            (f"{FOLDER}/{NAME}-B=2-N=8-K=16.json", "error", "gemm_a16w16 never looks for the suffix B=2-N=8-K=16"),
            ("gemm/gfx950-GEMM-NEW.json", "note", "no reader of it is known"),
        ],
    )
    def test_names_that_nobody_looks_for(self, name: str, level: str, text: str, tmp_path: Path) -> None:
        found = of_tree(tmp_path, {f"{FOLDER}/DEFAULT.json": ANY, name: ANY})
        assert [(f.level, f.rule, f.text) for f in found] == [(level, "name", text)]

    def test_a_longer_name_is_not_a_suffix_of_a_shorter_one(self, tmp_path: Path) -> None:
        files = {f"gemm/gfx950-{n}.json": ANY for n in (NAME, f"{NAME}-ATOMIC", f"{NAME}-ATOMIC-N=8-K=16")}
        assert not of_tree(tmp_path, files)

    def test_a_file_named_by_the_packed_width(self, tmp_path: Path) -> None:
        names = ("", "-N=8-K=4096", "-N=8-K=2048")
        found = of_tree(tmp_path, {f"gemm/gfx950-GEMM-AFP4WFP4{n}.json": ANY for n in names})
        assert [(f.level, f.rule, Path(f.path).stem[-6:]) for f in found] == [("warning", "packed k", "K=2048")]

    def test_a_file_that_is_no_json(self, tmp_path: Path) -> None:
        found = of_tree(tmp_path, {f"gemm/gfx950-{NAME}.json": "{"})
        assert [(f.level, f.rule) for f in found] == [("error", "unreadable")]
