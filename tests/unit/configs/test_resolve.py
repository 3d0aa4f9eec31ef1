"""The config that a shape gets, in every layout that AITER had; calls of its loader; the text of config files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.configs.default_readers import other_operators
from tests.standins.aiter.config_files import FLAT, FOLDERS, NESTED, NO_FALLBACK, operator, tree, values
from worker.triton_configs.config_file import ConfigFileError, parse_config_file, read_config_file, text_with_buckets
from worker.triton_configs.kinds import BY_NAME, KINDS
from worker.triton_configs.resolve import TRITON, ResolveError, Resolver, bucket_for, bucket_ranges

NAME = "GEMM-A16W16"
ANY = {"any": values(1)}
FOLDER = "gfx950/triton/gemm/gemm_a16w16"
GLUON = FOLDER.replace("triton", "gluon")
OLD = f"gemm/gfx950-{NAME}.json"


def resolver(root: Path, files: dict[str, Any], loader: str = FOLDERS) -> Resolver:
    return Resolver(tree(root, files, loader), "gfx950")


@pytest.mark.parametrize(
    ("files", "loader", "backend", "found"),
    [
        # a folder with a default counts before flat files, one without does not
        ([f"{FOLDER}/DEFAULT.json", OLD], FOLDERS, None, f"{FOLDER}/GEMM-A16W16-N=8-K=16.json"),
        ([f"{FOLDER}/{NAME}-N=8-K=32.json", OLD], FOLDERS, None, f"gemm/gfx950-{NAME}-N=8-K=16.json"),
        # Triton comes before Gluon unless a backend is named; one falls back to its flat folder and then to all
        ([f"{FOLDER}/DEFAULT.json", f"{GLUON}/DEFAULT.json"], FOLDERS, None, f"{FOLDER}/{NAME}-N=8-K=16.json"),
        ([f"{FOLDER}/DEFAULT.json", f"{GLUON}/DEFAULT.json"], FOLDERS, "gluon", f"{GLUON}/{NAME}-N=8-K=16.json"),
        ([OLD, f"gemm/gluon/gfx950-{NAME}.json"], FOLDERS, "gluon", f"gemm/gluon/gfx950-{NAME}-N=8-K=16.json"),
        ([OLD, f"gemm/gluon/gfx950-{NAME}.json"], FOLDERS, "triton", f"gemm/gfx950-{NAME}-N=8-K=16.json"),
        # an older nested layout has no folder of the config; a flat loader ignores folders, backends and B
        ([f"gfx950/triton/gemm/{NAME}.json"], NESTED, None, f"gfx950/triton/gemm/{NAME}-N=8-K=16.json"),
        ([f"{FOLDER}/DEFAULT.json", OLD], FLAT, "gluon", f"gemm/gfx950-{NAME}-N=8-K=16.json"),
    ],
)
def test_where_the_file_of_a_shape_lies(
    files: list[str], loader: str, backend: str | None, found: str, tmp_path: Path
) -> None:
    r = resolver(tmp_path, dict.fromkeys(files, ANY), loader)
    kind = replace(BY_NAME["a16w16"], backend=backend, batch_in_name=loader == FLAT)
    target = r.own_file(kind, 8, 16, 2)
    assert str(target.relative_to(tmp_path / "aiter/ops/triton/configs")) == found
    assert r.file_for(kind, 8, 16) == (r.folder(NAME, backend).default, False)
    tree(tmp_path, {found: ANY}, loader)
    assert r.file_for(kind, 8, 16) == (target, True)


@pytest.mark.parametrize(
    ("files", "loader", "fault"),
    [
        (
            {OLD: ANY},
            NO_FALLBACK,
            "no default file for gfx950.* or write it first",
        ),  # once the loader has forgotten flat files
        ({}, "def load(): ...\n", "has no get_gemm_config"),
        ({}, "def load(", "cannot be read"),
    ],
)
def test_a_tree_that_cannot_be_told_is_refused(files: dict[str, Any], loader: str, fault: str, tmp_path: Path) -> None:
    with pytest.raises(ResolveError, match=fault):
        resolver(tmp_path, files, loader).folder(NAME)


def test_a_specialised_file_replaces_the_default_wholly(tmp_path: Path) -> None:
    own = {"M_LEQ_16": values(16), "any": values(2)}
    files = {OLD: {"M_LEQ_64": values(64), **ANY}, f"gemm/gfx950-{NAME}-N=8-K=16.json": own}
    r = resolver(tmp_path, files)
    kind = BY_NAME["a16w16"]
    found = r.config_for(kind, 64, 8, 16)
    assert (found.bucket, found.values, found.specialised) == ("any", values(2), True)
    assert r.config_for(kind, 16, 8, 16).bucket == "M_LEQ_16"
    assert r.config_for(kind, 64, 8, 32).bucket == "M_LEQ_64"


def test_a_file_of_b_comes_first_where_the_caller_gives_b(tmp_path: Path) -> None:
    name = "BATCHED_GEMM-A16W16"
    r = resolver(tmp_path, {f"gemm/gfx950-{name}{s}.json": ANY for s in ("", "-N=8-K=16", "-B=2-N=8-K=16")})
    kind = BY_NAME["batched_bf16"]
    assert "-B=2-" in r.config_for(kind, 1, 8, 16, 2).path.name
    assert r.config_for(kind, 1, 8, 16, 3).path.name == f"gfx950-{name}-N=8-K=16.json"


def test_lower_bounds_come_first_then_the_highest_reached_then_any() -> None:
    config: dict[str, Any] = {"M_LEQ_16": {}, "M_LEQ_64": {}, "M_GEQ_4096": {}, "M_GEQ_256": {}, "any": {}}
    bounds = (16, 64, 256, 4096)
    for m, bucket in ((1, "M_LEQ_16"), (16, "M_LEQ_16"), (17, "M_LEQ_64"), (65, "any"), (256, "M_GEQ_256"),
                      (4095, "M_GEQ_256"), (4096, "M_GEQ_4096")):  # fmt: skip
        assert bucket_for(config, m, bounds) == bucket
    assert bucket_ranges(config, bounds) == {
        "M_LEQ_16": [(1, 16)], "M_LEQ_64": [(17, 64)], "any": [(65, 255)], "M_GEQ_256": [(256, 4095)],
        "M_GEQ_4096": [(4096, None)],
    }  # fmt: skip
    assert bucket_for({"M_LEQ_31": {}, "any": {}}, 20, (16, 64)) == "any", "a bucket of no bound is never found"
    with pytest.raises(ResolveError, match="no bucket covers M=65"):
        bucket_for({"M_LEQ_64": {}}, 65, (16, 64))


def test_bounds_are_those_of_the_call_in_the_tree(tmp_path: Path) -> None:
    kind = BY_NAME["a16w16"]
    assert resolver(tmp_path, {}).bounds(kind) == (16, 64, 256, 4096)
    module = tmp_path / "aiter/ops/triton/_triton_kernels/gemm/basic/gemm_a16w16.py"
    module.parent.mkdir(parents=True)
    module.write_text('def f(M):\n    return get_gemm_config("GEMM-A16W16", M, bounds=(8, 320))\n')
    assert Resolver(tmp_path, "gfx950").bounds(kind) == (8, 320)


def test_operators_that_read_a_kinds_files_are_found_and_those_that_the_tuner_can_call_are_known(
    tmp_path: Path,
) -> None:
    root = tree(tmp_path, {f"gemm/gfx950-{c}.json": ANY for c in (NAME, "GEMM-A8W8")})

    def operators(kind: str, chip: str = "gfx950") -> dict[str, bool]:
        return other_operators(Resolver(root, chip), BY_NAME[kind])

    quant = "fused_gemm_a16w16_quant_x"
    assert operators("a16w16") == {}
    operator(operator(root, quant), "fused_new")
    assert operators("a16w16") == {quant: True, "fused_new": False}
    (root / TRITON / f"gemm/fused/{quant}.py").rename(root / TRITON / f"{quant}.py")
    assert operators("a16w16") == {quant: True, "fused_new": False}, "as before there were folders of gemm"
    gluon = root / TRITON / "gluon" / "other.py"
    gluon.parent.mkdir(parents=True)
    gluon.write_text('def f(M, N, K):\n    return get_gemm_config("GEMM-A8W8", M, N, K, backend="gluon")\n')
    assert operators("a8w8") == {"gluon.other": False}
    tree(root, {"gemm/gluon/gfx950-GEMM-A8W8.json": ANY, "gfx942/triton/gemm/gemm_a8w8/DEFAULT.json": ANY})
    assert operators("a8w8") == {}, "Gluon has a file of its own"
    assert operators("a8w8", "gfx942") == {}, "there is no file that it could read"
    callers = [c for kind in KINDS for c in kind.callers]
    assert len({(c.module, c.function) for c in callers}) == len(callers)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('{"any": {},\n  }', "2:3: no JSON"),
        ('{"any": {"a": 1,\n "a": 2}}', "2:2: 'a' is there twice"),
        ("[]", "1:1: is no JSON object"),
        (f'{{"any": {{"x": {"9" * 100_000}}}}}', "1:1: no JSON: Exceeds the limit"),
        ('{"_note": "x",\n "any": 3}', "2:1: any is not a JSON object"),
    ],
)
def test_a_fault_has_a_line(text: str, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(ConfigFileError) as e:
        read_config_file(path)
    assert str(e.value).startswith(f"{path}:{fault}")


@pytest.mark.parametrize("indent", ["  ", "    "])
@pytest.mark.parametrize("end", ["", "\n"])
def test_a_change_keeps_indent_order_unknown_keys_and_end(indent: str, end: str) -> None:
    text = '{\n_"_note": "kept",\n_"M_LEQ_64": {\n__"b": 1,\n__"a": null\n_}\n}'.replace("\n__", f"\n{indent * 2}")
    file = parse_config_file(text.replace("\n_", f"\n{indent}") + end)
    assert text_with_buckets(file, file.buckets) == file.text
    assert text_with_buckets(file, {"M_LEQ_64": {"b": 2, "a": None}}) == file.text.replace('"b": 1', '"b": 2')
