"""`gemmfleet configs check` on the files that vLLM 0.33.0 and SGLang 0.5.23 ship: defects of each class that are known.

The look-ups, launchers and kernels are the engines' own; Triton binds and compiles without a GPU. Each test checks a
few files, in a copy of the package's modules.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

pytest.importorskip("triton", reason="Triton is not installed")

from orchestrator.cli.app import app
from orchestrator.cli.build_tree import opened_tree
from orchestrator.configs import engine_check
from orchestrator.configs.engine_check import check
from orchestrator.errors import InputError
from orchestrator.image.image_files import ENGINES
from tests.support.engines import tree, wheel
from worker.foreign.runner import ForeignCodeError
from worker.text import Finding
from worker.triton_configs.engine_package import PROJECTS, ServingEngineError, locate_engine
from worker.triton_configs.resolve import CONFIGS

LINEAR, MOE = PROJECTS["vllm"].config_folders
S_LINEAR, S_MOE = PROJECTS["sglang"].config_folders
USUAL = {
    "BLOCK_SIZE_M": 64,
    "BLOCK_SIZE_N": 128,
    "BLOCK_SIZE_K": 128,
    "GROUP_SIZE_M": 8,
    "num_warps": 4,
    "num_stages": 2,
}
H200 = "N=512,K=1024,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"
SHIPPED = object()
"""In place of a table: the file as the wheel has it."""
KEYS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)


@pytest.fixture
def package(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A package of the files that are taken out of images, without config files."""
    project: str = request.param
    for part in ENGINES:
        source, target = tree(project) / part, tmp_path / part
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("configs"), dirs_exist_ok=True)
        elif source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    return tmp_path / project


vllm = pytest.mark.parametrize("package", ["vllm"], indirect=True)
sglang = pytest.mark.parametrize("package", ["sglang"], indirect=True)


def ship(package: Path, folder: str, name: str, *also: str) -> None:
    """Copy a file of the wheel into the package, under other names as well."""
    source = tree(package.name) / package.name / folder / "configs" / name
    for target in (name, *also):
        path = package / folder / "configs" / target
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, path)


def write(package: Path, folder: str, name: str, table: Any) -> None:
    path = package / folder / "configs" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(table if isinstance(table, str) else json.dumps(table, indent=4))


def found(package: Path, *, compiling: bool = False) -> dict[tuple[str, str], list[Finding]]:
    """Findings but the notes on taste, by level and rule."""
    out: dict[tuple[str, str], list[Finding]] = {}
    for f in check(locate_engine(package), None, {}, compiling=compiling, say=lambda text: None)["findings"]:
        if f.rule not in ("outlier", "default"):
            out.setdefault((f.level, f.rule), []).append(f)
    return out


def found_in_files(package: Path) -> dict[str, tuple[str, str, int, str]]:
    """(level, rule, line, text) of the one finding of each file that has any."""
    findings = [f for of_rule in found(package).values() for f in of_rule]
    by_file: dict[str, tuple[str, str, int, str]] = {}
    for f in findings:
        by_file[Path(f.path).name] = (f.level, f.rule, f.line, f.text)
    assert len(by_file) == len(findings), findings
    return by_file


LOOKED_UP = "dtype=fp8_w8a8,block_shape=[128,128].json"
NEVER = "never read: no look-up of this version forms"
OF_VLLM: list[tuple[str, str, Any, tuple[str, str, int, str] | None]] = [
    # clean files; H200s of all kinds read the MoE files of one name
    (LINEAR, f"N=1536,K=7168,device_name=NVIDIA_H200,{LOOKED_UP}", SHIPPED, None),
    (MOE, "E=8,N=7168,device_name=NVIDIA_H200.json", SHIPPED, None),
    (MOE, f"E=256,N=256,device_name=AMD_Instinct_MI300X,{LOOKED_UP}", SHIPPED, None),
    # a dtype that no look-up forms
    (LINEAR, "N=1536,K=1536,device_name=NVIDIA_A100-SXM4-80GB,dtype=int8_w8a8,block_shape=[128,128].json", SHIPPED,
     ("error", "name", 0, f"{NEVER} dtype=int8_w8a8")),
    (MOE, "E=64,N=8960,device_name=NVIDIA_H100_80GB_HBM3,dtype=bf16.json", SHIPPED,
     ("error", "name", 0, f"{NEVER} dtype=bf16")),
    (MOE, "E=16,N=3072,device_name=NVIDIA_H100_80GB_HBM3,dtype=float8.json", SHIPPED,
     ("error", "name", 0, f"{NEVER} dtype=float8")),
    (MOE, "E=256,N=128,device_name=NVIDIA_A800-SXM4-80GB,dtype=int8_w8a8.json", SHIPPED,
     ("error", "name", 0, f"{NEVER} dtype=int8_w8a8")),
    # devices are named by the engine's own rules, AMD's by device ids; of a chip that the map lacks the driver's name
    # counts
    (MOE, "E=8,N=7168,device_name=NVIDIA_H200_NVL.json", dict.fromkeys(KEYS, USUAL),
     ("error", "name", 0, f"{NEVER} device_name=NVIDIA_H200_NVL")),
    (LINEAR, f"N=1536,K=1536,device_name=AMD_Instinct_MI325_OAM,{LOOKED_UP}", SHIPPED,
     ("error", "name", 0, f"{NEVER} device_name=AMD_Instinct_MI325_OAM")),
    (MOE, "E=160,N=192,device_name=AMD_Instinct_MI350_OAM,dtype=fp8_w8a8.json", SHIPPED, None),
    # entries far from the M that they serve
    (LINEAR, f"N=1536,K=7168,device_name=NVIDIA_L20,{LOOKED_UP}", SHIPPED,
     ("warning", "keys", 0, "lacks 15 of the 18 usual keys: the entry of 2048 serves M = 1..2560")),
    (LINEAR, f"N=1536,K=7168,device_name=NVIDIA_L40S,{LOOKED_UP}", {m: USUAL for m in KEYS if m != 1536},
     ("note", "keys", 0, "lacks 1 of the 18 usual keys: the entry of 1024 serves M = 769..1536")),
    # what a look-up or a launch fails on
    (LINEAR, H200, {"triton_version": "3.8.0"} | dict.fromkeys(KEYS, USUAL),
     ("error", "look-up", 0, "get_w8a8_block_fp8_configs fails: ValueError: invalid literal for int()")),
    (LINEAR, H200.replace("K=1024", "K=2048"), {m: USUAL | {"waves_per_eu": 2} if m == 8 else USUAL for m in KEYS},
     ("error", "refused", 26,
      "M = 8: the launch fails: KeyError: 'Keyword argument waves_per_eu was specified but unrecognised'")),
    (LINEAR, H200.replace("K=1024", "K=4096"), '{"1": {}, "1": {}}', ("error", "unreadable", 0, "")),
]  # fmt: skip
"""Config files, shipped or with a table of ours, and the finding of each; its text may go on."""


@vllm
def test_defects_of_each_class_are_found_in_vllms_files(package: Path) -> None:
    for folder, name, table, _ in OF_VLLM:
        if table is SHIPPED:
            ship(package, folder, name)
        else:
            write(package, folder, name, table)
    every = found_in_files(package)
    for _, name, _, expected in OF_VLLM:
        if expected is None:
            assert name not in every
            continue
        *where, text = expected
        assert every[name][:3] == tuple(where), name
        assert every[name][3].startswith(text), every[name]


@vllm
def test_code_that_writes_into_every_descriptor_is_one_error(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a message in the pipes of a pool kept all of it waiting."""
    ship(package, MOE, "E=8,N=7168,device_name=NVIDIA_H200.json", "E=8,N=7168,device_name=NVIDIA_H20.json")
    with (package / "envs.py").open("a") as f:
        f.write("""
for fd in range(3, 64):
    try:
        os.write(fd, b'{"value": ')
    except OSError:
        pass
""")
    monkeypatch.setattr(engine_check, "LOOK_LIMITS", replace(engine_check.LOOK_LIMITS, seconds=300))
    with pytest.raises(ForeignCodeError, match="gave an answer that is not JSON"):
        found(package)


@sglang
def test_folders_of_other_versions_of_triton(package: Path) -> None:
    name = "E=8,N=7168,device_name=NVIDIA_H100_80GB_HBM3.json"
    for folder in ("triton_3_1_0", "triton_3_3_1"):
        ship(package, S_MOE, f"{folder}/{name}")
    every = found(package)
    assert [f.path.rpartition("/")[2] for f in every[("warning", "folder")]] == ["triton_3_1_0"]
    (shadowed,) = every[("warning", "shadowed")]
    assert "for which the file in triton_3_3_1 counts; only by that of triton_3_1_0" in shadowed.text
    assert len(every) == 2


@sglang
def test_all_look_ups_of_sglang_are_asked_and_wrong_tiles_found(package: Path) -> None:
    """Linear layers have three, and MoE files come with what SGLang alone puts into names."""
    wrong = "E=512,N=256,device_name=NVIDIA_H100_80GB_HBM3,dtype=fp8_w8a8,block_shape=[128, 128].json"
    ship(package, S_MOE, f"triton_3_5_1/{wrong}")
    for name in (
        "N=1536,K=1536,device_name=NVIDIA_A800-SXM4-80GB,dtype=int8_w8a8,block_shape=[128, 128].json",
        "N=7168,K=1024,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128].json",
    ):
        ship(package, S_LINEAR, name)
    channelwise = next((tree("sglang") / "sglang" / S_LINEAR / "configs").glob("*channelwise.json"))
    ship(package, S_LINEAR, channelwise.name)
    ship(
        package,
        S_MOE,
        "triton_3_5_1/E=256,N=256,device_name=NVIDIA_H20,dtype=fp8_w8a8,block_shape=[128, 128]_down.json",
    )
    ship(package, S_MOE, "triton_3_1_0/E=256,N=128,device_name=NVIDIA_A100-SXM4-80GB,dtype=int8_w8a8.json")
    every = found(package)
    assert {rule for level, rule in every if level == "error"} == {"refused", "scale group"}
    (refused,) = every[("error", "refused")]
    assert "AssertionError: int8 quantization only supports channel-wise quantization" in refused.text
    (group,) = every[("error", "scale group")]
    text = "wrong results: BLOCK_SIZE_K is 256, and a step takes the scales of one group of 128"
    assert (Path(group.path).name, group.line, group.text) == (wrong, 66, f"M = 64, 128, 256, 512: {text}")


@vllm
def test_each_distinct_entry_is_compiled_once_and_kept(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AMD's 64 KiB do not hold a step of 1024 x 128."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    name = H200.replace("NVIDIA_H200", "AMD_Instinct_MI300X")
    large = USUAL | {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 1024, "num_warps": 8}
    write(package, LINEAR, name, {m: large if m == 4096 else USUAL for m in KEYS})
    every = found(package, compiling=True)
    ((error,),) = (every.pop(("error", "shared memory")),)
    assert (error.line, error.text.startswith("M = 4096: needs ")) == (138, True)
    assert error.text.endswith(" bytes of shared memory, 65536 are there")
    assert set(every) <= {("warning", "spills")}
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.hsaco")}
    assert 2 <= len(kept) < len(KEYS), "the M that are multiples of 16 share their code"
    assert ("error", "shared memory") in found(package, compiling=True)
    assert kept == {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.hsaco")}


@vllm
def test_the_command_takes_a_wheel_or_a_tree_and_narrows(package: Path) -> None:
    ship(package, MOE, "E=8,N=7168,device_name=NVIDIA_H200.json")
    ship(package, MOE, "E=64,N=8960,device_name=NVIDIA_H100_80GB_HBM3,dtype=bf16.json")

    def run(*args: str) -> Result:
        return CliRunner().invoke(app, ["configs", "check", "--build", str(package.parent), *args])

    done = run("--json")
    document = json.loads(done.output)
    assert (done.exit_code, document["files"], document["errors"]) == (1, 2, 1)
    assert isinstance(run("--shape", "E=8,N=1").exception, InputError)
    assert "give N=1280,K=8192 or E=1280,N=8192" in str(run("--shape", "E=8,K=1").exception)
    assert str(run("--gfx", "gfx950", "--family", "a8w8").exception) == "--gfx, --family: not for the configs of vllm"
    fault = str(run("--project", "sglang").exception)
    assert fault == f"--project sglang: {package.parent} holds vllm; leave out --project to check that"
    (package.parent / CONFIGS).mkdir(parents=True)
    assert str(run().exception) == "there are aiter, vllm: say with --project which one to check"
    done = run("--project", "vllm", "--device", "NVIDIA_H200", "--shape", "E=8,N=7168")
    assert (done.exit_code, ": 1 file, " in done.output.splitlines()[0]) == (0, True)
    with opened_tree(str(wheel("vllm")), None, triton=True) as root:
        assert len(list((root / "vllm" / MOE / "configs").glob("E=*.json"))) == 338
    with pytest.raises(ServingEngineError, match="for NVIDIA H300, E=8; the names of files spell it NVIDIA_H300"):
        check(locate_engine(package), "NVIDIA H300", {"E": 8}, compiling=False, say=print)


@pytest.mark.parametrize(
    ("folder", "content", "project"),
    [
        ("vllm", str(CONFIGS), "aiter"),
        ("sglang", f"vllm/{MOE}", "vllm"),
        ("aiter", f"python/sglang/{S_MOE}", "sglang"),
        ("a package of another name", MOE, "vllm"),
        ("vllm", "nothing of it", "aiter"),
    ],
)
def test_the_project_is_asked_of_the_folder_whatever_its_name(
    tmp_path: Path, folder: str, content: str, project: str
) -> None:
    (tmp_path / folder / content).mkdir(parents=True)
    argv = ["configs", "check", "--build", str(tmp_path / folder), "--gfx", "gfx950", "--device", "NVIDIA_H200"]
    assert f": not for the configs of {project}" in str(CliRunner().invoke(app, argv).exception)


@vllm
def test_an_override_folder_is_checked_by_the_vllm_that_reads_it(package: Path, tmp_path: Path) -> None:
    """Only the MoE look-up reads from it; linear layers' files lie there in vain."""
    moe = "E=62,N=130,device_name=AMD_Instinct_MI300X.json"
    ship(package, LINEAR, "N=1536,K=7168,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json")
    override = tmp_path / "override"
    override.mkdir()
    (override / moe).write_text(json.dumps({m: USUAL | {"num_stage": 2} if m == 64 else USUAL for m in KEYS}))
    shutil.copytree(package / LINEAR / "configs", override, dirs_exist_ok=True)

    def run(*args: str) -> Result:
        return CliRunner().invoke(app, ["configs", "check", "--build", str(override), *args])

    document = json.loads(run("--engine", str(package.parent), "--json").output)
    errors = {(f["rule"], f["path"]): f["text"] for f in document["findings"] if f["level"] == "error"}
    assert errors.pop(("refused", moe)).startswith("M = 64: the launch fails: KeyError: 'Keyword argument num_stage")
    ((rule, path),) = errors
    assert (rule, path[:14], document["files"]) == ("override", "N=1536,K=7168,", 2)
    assert errors[rule, path].startswith("never read: get_w8a8_block_fp8_configs takes this file from ")
    assert "for an override folder its vLLM with --engine" in str(run().exception)
    done = run("--engine", str(package), "--project", "aiter")
    assert str(done.exception) == "--engine: not for the configs of aiter"
    assert "is neither a folder" in str(run("--engine", str(tmp_path / "nothing")).exception)


def test_a_missing_triton_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "orchestrator.configs.engine_check")
    monkeypatch.delattr("orchestrator.configs.engine_check", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    (tmp_path / "vllm" / MOE).mkdir(parents=True)
    done = CliRunner().invoke(app, ["configs", "check", "--build", str(tmp_path)])
    assert str(done.exception).endswith(": pip install '.[triton,torch]' in a checkout of gemmfleet")


def test_layers_are_compared_with_the_files_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trees = {project: tree(project) for project in ("vllm", "sglang")}
    monkeypatch.setitem(sys.modules, "triton", None)  # names alone are read
    monkeypatch.delitem(sys.modules, "orchestrator.configs.engine_check", raising=False)
    log = tmp_path / "server.log"
    missing = "Config file not found at /x/triton_3_6_0/{}.json, you can create them"
    sizes = ("E=32,N=1792{}", "E=512,N=128{},dtype=fp8_w8a8,block_shape=[128, 128]", "E=3,N=7{}")
    log.write_text("".join(missing.format(size.format(",device_name=NVIDIA_H200")) + "\n" for size in sizes))
    shapes = tmp_path / "shapes-a8w8_blockscale.csv"
    shapes.write_text("M,N,K\n16,2112,7168\n64,2112,7168\n")

    def covered(project: str, source: Path, *options: str) -> Any:
        argv = ["configs", "check", "--build", str(trees[project]), "--coverage", str(source), "--json", *options]
        done = CliRunner().invoke(app, argv)
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)["layers"]

    some, both, none = covered("sglang", log)
    assert (some["layer"], some["dtype"]) == ("E=32 N=1792", "bf16")
    assert "NVIDIA_H200" not in some["devices"]
    assert some["devices"]["NVIDIA_B300_SXM6_AC"] == ["triton_3_7_1 + down"]
    assert (both["dtype"], both["devices"]["NVIDIA_H200"]) == ("fp8_w8a8 128x128", ["triton_3_6_0 + down"])
    assert none == {"layer": "E=3 N=7", "dtype": "bf16", "devices": {}}
    (linear,) = covered("vllm", shapes, "--device", "NVIDIA_H200")
    assert linear == {"layer": "N=2112 K=7168", "dtype": "fp8_w8a8 128x128", "devices": {"NVIDIA_H200": [""]}}
    text = CliRunner().invoke(app, ["configs", "check", "--build", str(trees["sglang"]), "--coverage", str(log)]).stdout
    assert "no device" in text
