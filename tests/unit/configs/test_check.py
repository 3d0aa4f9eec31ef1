"""`gemmfleet configs check` as a user runs it, and the faults of config files by AITER's own rules.

The compiler is replaced by a stand-in.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.configs import check as checking
from orchestrator.configs.check import CompiledBucket, check, chips_of
from orchestrator.configs.lint import lint, lint_content
from orchestrator.errors import InputError
from orchestrator.image import image_files
from tests.kits.fleet import command
from tests.standins.aiter.config_files import tree, values
from worker.triton_configs.config_file import parse_config_file
from worker.triton_configs.kinds import BY_NAME
from worker.triton_configs.resolve import Resolver

FILES = {
    "gemm/gfx950-GEMM-A16W16.json": {"M_LEQ_64": values(32), "any": values(128)},
    "gemm/gfx950-GEMM-A16W16-N=512-K=1024.json": {"M_LEQ_64": values(7), "any": values(9)},
    "gemm/gfx950-BATCHED_GEMM-A16W16.json": {"any": values(1)},
    "gemm/gfx942-GEMM-A8W8.json": {"any": values(1)},
    "gemm/gluon/gfx950-GEMM-A8W8.json": {"any": {"x": 1}},
}
FACTS: dict[int, dict[str, Any]] = {
    7: {"spills": 30, "vgprs": 256, "lds": 1000}, 9: {"lds": 163841}, 32: {"error": "CompilationError: no"},
}  # fmt: skip


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tree(tmp_path / "tree", FILES)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> list[CompiledBucket]:
    """Configs that were given to be compiled; BLOCK_SIZE_M says what comes of it."""
    given: list[CompiledBucket] = []

    def compile_all(
        root: Path, gfx: str, buckets: Sequence[CompiledBucket], progress: Callable[[int, int], None]
    ) -> list[CompiledBucket]:
        given.extend(buckets)
        return [replace(b, **FACTS.get(b.values["BLOCK_SIZE_M"], {"vgprs": 128})) for b in buckets]

    monkeypatch.setattr(checking, "_compile", compile_all)
    return given


def run(*args: object) -> tuple[int, str]:
    done = command("configs", "check", "--build", *args)
    return done.code, done.out + done.err


def test_every_bucket_is_compiled_for_its_last_m_and_errors_end_with_1(
    root: Path, compiler: list[CompiledBucket]
) -> None:
    code, text = run(str(root), "--gfx", "gfx950", "--family", "a16w16", "--compile")
    assert code == 1
    assert [(c.bucket, c.shape) for c in compiler] == [
        ("M_LEQ_64", (64, 512, 1024, None)), ("any", (8192, 512, 1024, None)),
        ("M_LEQ_64", (64, 8192, 8192, None)), ("any", (8192, 8192, 8192, None)),
    ]  # fmt: skip
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "gfx950: 2 files, 4 buckets compiled, 1 with spills"
    assert "error compile gfx950-GEMM-A16W16.json:2 M_LEQ_64 does not compile: CompilationError: no" in lines
    needs = "needs 163,841 B of LDS, the chip has 163,840: it cannot be launched"
    assert f"error lds gfx950-GEMM-A16W16-N=512-K=1024.json:14 any 0 None 163841 {needs}" in lines
    assert "warning spills gfx950-GEMM-A16W16-N=512-K=1024.json:2 M_LEQ_64 30 256 1000 spills 30 registers" in lines
    assert lines[-1] == "2 errors, 1 warning"


def test_lint_alone_reads_every_chip_and_an_image_is_read_as_a_folder_is(
    root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[str, Path | None, tuple[str, ...]]] = []

    def copied(image: str, folder: Path, inventory: Path | None, parts: tuple[str, ...]) -> None:
        asked.append((image, inventory, parts))
        shutil.copytree(root, folder, dirs_exist_ok=True)

    monkeypatch.setattr(image_files, "take_out", copied)
    assert chips_of(root) == ["gfx942", "gfx950"]
    inventory = tmp_path / "inv.yaml"
    for build in ((str(root),), ("rocm/aiter:1", "-i", str(inventory))):
        code, text = run(*build)
        assert (code, text.splitlines()[-1]) == (0, "0 errors, 0 warnings")
        assert "gfx942: 1 file, 0 buckets compiled, 0 with spills" in text
    assert asked == [("rocm/aiter:1", inventory, (*image_files.TRITON, *image_files.ENGINES))]


def test_without_a_compiler_or_a_package_of_aiters_there_is_one_error_with_the_way_out(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    way_out = "pip install '.[triton,torch]' in a checkout of gemmfleet, or leave out --compile"
    wrapper = root / "aiter/ops/triton/gemm/basic/gemm_a16w16.py"
    wrapper.parent.mkdir(parents=True, exist_ok=True)
    wrapper.write_text("import no_such_package\n")
    with pytest.raises(InputError) as e:
        check(root, "gfx950", compiling=True)
    why = "AITER's Triton modules cannot be imported on this machine: no module no_such_package"
    assert e.value.faults == [f"{why}: {way_out}"]
    monkeypatch.setattr(checking, "find_spec", lambda name: None)
    with pytest.raises(InputError) as e:
        check(root, "gfx950", compiling=True)
    assert e.value.faults[0].endswith(way_out)


@pytest.mark.parametrize(
    ("args", "fault"),
    [
        (("--family", "fmoe"), "has no Triton configs; choose one of a16w16"),
        (("--shape", "M=3"), "give N=1280,K=8192"),
        ((".",), "holds no Triton GEMM configs"),
    ],
)
def test_a_mistake_is_one_line(root: Path, args: tuple[str, ...], fault: str) -> None:
    build = [str(root)] if args[0].startswith("-") else []
    assert fault in run(*build, *args)[1]


# --- lint -------------------------------------------------------------------------------------------------------------

BOUNDS = (16, 64, 256)
ANY = {"any": values()}
NAME = "GEMM-A16W16"
FOLDER = "gfx950/triton/gemm/gemm_a16w16"
PLAIN = {k: v for k, v in values().items() if k not in ("waves_per_eu", "matrix_instr_nonkdim")}


def without(*keys: str) -> dict[str, Any]:
    return {"any": {k: v for k, v in values().items() if k not in keys}}


@pytest.mark.parametrize(
    ("kind", "arch", "document", "findings"),
    [
        ("a16w16", "gfx950", {"M_LEQ_16": values(), "_note": "by hand", **ANY}, []),
        # buckets that no M finds
        ("a16w16", "gfx950", {"M_LEQ_31": values(), **ANY}, ["error unreachable M_LEQ_31"]),
        ("a16w16", "gfx950", {"M_LEQ_256": values(), "M_GEQ_16": values(), **ANY}, []),
        # `any` is missing
        ("a16w16", "gfx950", {"M_LEQ_64": values()}, ["error any "]),
        ("a16w16", "gfx950", {"M_LEQ_64": values(), "M_GEQ_64": values()}, ["warning any "]),
        # kpack is for gfx942 alone
        ("a16w16", "gfx950", {"any": values(kpack=1)}, ["error kpack any"]),
        ("a16w16", "gfx942", {"any": values(kpack=1)}, []),
        # keys that are missing, or that the kernel or the chip refuses; a Gluon kernel has keys of its own
        ("a16w16", "gfx950", without("NUM_KSPLIT"), ["warning required any"]),
        ("a16w16", "gfx950", without("NUM_KSPLIT", "BLOCK_SIZE_K"), ["error required any"]),
        ("a16w16_gated", "gfx950", without("NUM_KSPLIT"), []),
        ("a16w16", "90", ANY, ["error refused any"]),
        ("a16w16", "90", {"any": PLAIN}, []),
        ("a16w16", "gfx950", {"any": {"BLOCK_M": 16, "kernel_type": "compute_bound"}}, []),
        # what a wrapper asserts
        ("a8w8_blockscale", "gfx950", {"any": values(BLOCK_SIZE_K=64)}, ["error block_k any"]),
        ("a4w4_preshuffle", "gfx950", {"M_LEQ_16": values(16), "any": values(32)}, ["error block_m any"]),
        ("a4w4_preshuffle", "gfx950", {"M_LEQ_16": values(16), "M_LEQ_31": values(16), "any": values(32)}, []),
        # a bucket unlike both neighbours, which are alike
        ("a16w16", "gfx950", {"M_LEQ_16": values(16), "M_LEQ_64": values(16, BLOCK_SIZE_N=256, num_warps=1),
                              "any": values(32)}, ["note outlier M_LEQ_64"]),
    ],
)  # fmt: skip
def test_faults_of_a_files_content(kind: str, arch: str, document: dict[str, Any], findings: list[str]) -> None:
    bounds = (16, 31, 64) if kind == "a4w4_preshuffle" else BOUNDS
    found = lint_content(parse_config_file(json.dumps(document)), BY_NAME[kind], bounds, arch)
    assert [f"{f.level} {f.rule} {f.bucket}" for f in found] == findings


@pytest.mark.parametrize(
    ("files", "finding"),
    [
        # a family split over two layouts; specialised files without a default; files of a backend count
        ({f"{FOLDER}/DEFAULT.json": ANY, f"gemm/gfx950-{NAME}-N=8-K=16.json": ANY}, "error split nobody reads it"),
        ({f"{FOLDER}/{NAME}-N=8-K=16.json": ANY}, "error default nobody reads it"),
        ({f"gemm/gfx950-{NAME}.json": ANY, f"gemm/gluon/gfx950-{NAME}.json": {"any": {"x": 1}}}, ""),
        # names that nobody looks for
        ({f"{FOLDER}/gfx950-{NAME}-N=8-K=16.json": ANY}, "error name the folder names the chip already"),
        ({f"{FOLDER}/DEFAULT.json": ANY, f"{FOLDER}/{NAME}-K=16-N=8.json": ANY},
         "error name gemm_a16w16 never looks for the suffix K=16-N=8"),
        ({"gemm/gfx950-GEMM-NEW.json": ANY}, "note name no reader of it is known"),
        # a file named by the packed width; one that is no JSON
        ({f"gemm/gfx950-GEMM-AFP4WFP4{n}.json": ANY for n in ("", "-N=8-K=4096", "-N=8-K=2048")},
         "warning packed k same as gfx950-GEMM-AFP4WFP4-N=8-K=4096.json"),
        ({f"gemm/gfx950-{NAME}.json": "{"}, "error unreadable "),
    ],
)  # fmt: skip
def test_faults_of_a_files_place_or_name(files: dict[str, Any], finding: str, tmp_path: Path) -> None:
    found = [f"{f.level} {f.rule} {f.text}" for f in lint(Resolver(tree(tmp_path, files), "gfx950"))]
    assert len(found) == bool(finding)
    assert "".join(found).startswith(finding)
