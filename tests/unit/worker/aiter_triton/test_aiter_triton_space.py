"""Configs of a kind: seeds, names, doubles, legality; and a wrapper compiled for a chip that is not here."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.paths import ROOT
from tests.standins.triton_tree import make, values
from worker.triton_configs.kinds import AMD_ONLY, BY_NAME
from worker.triton_configs.resolve import ResolveError
from worker.tuners.aiter_triton import space
from worker.tuners.aiter_triton.space import KindProblem, Seeds, config_of, portable, problem_of
from worker.tuners.common.problem import UnsupportedError
from worker.tuners.search.compiling import number_after, sections
from worker.tuners.search.model import Knobs
from worker.tuners.search.source import Target, known

KEY: dict[str, int | str] = {"M": 64, "N": 512, "K": 1024, "dtype": "torch.bfloat16", "outdtype": "torch.bfloat16"}
MI355X, H200 = known("gfx950"), known(90)
A16W16 = BY_NAME["a16w16"]


def problem(kind: str = "a16w16", family: str = "", gfx: str = "gfx950", **key: int | str) -> KindProblem:
    return problem_of(kind, family or BY_NAME[kind].family, {**KEY, **key}, gfx)


def as_given(given: dict[str, Any]) -> dict[str, Any]:
    """A wrapper that rewrites nothing."""
    return dict(given)


def test_a_name_spells_every_knob() -> None:
    made = config_of(values(16, 64, 256, amd=True, cache_modifier=".cg", NUM_KSPLIT=4, kpack=2))
    assert made.name == "config_16x64x256_g1_k4_w4_s2_eu2_mfma16_cg_kpack=2"
    assert (made.split_k, made.simplicity) == (4, (4, 2, 2))
    assert made.knobs == Knobs(16, 64, 256, 1, 4, 4, 2, 2, 16, 2)
    assert config_of(made.values) == made


def test_seeds_are_todays_bucket_its_neighbours_the_defaults_and_those_of_near_shapes(tmp_path: Path) -> None:
    configs = {
        "DEFAULT.json": {"M_LEQ_16": values(16), "M_LEQ_64": values(32), "any": values(64)},
        "GEMM-A16W16-N=512-K=1024.json": {"M_LEQ_16": values(17), "M_LEQ_64": values(33), "any": values(65)},
        "GEMM-A16W16-N=512-K=2048.json": {"any": values(128)},
        "GEMM-A16W16-N=16-K=65536.json": {"any": values(256)},
        "GEMM-A16W16-N=1024-K=1024.json": {"any": {"BLOCK_SIZE_M": 99}},
    }
    seeds = Seeds(make(tmp_path, configs), "90", A16W16)
    assert seeds.bounds == (16, 64, 256)
    assert seeds.today(40, 512, 1024, None).values == values(33)
    rows = [c.values["BLOCK_SIZE_M"] for c in seeds.of(40, 512, 1024, None)]
    assert rows == [33, 65, 17, 32, 128, 256], "a bucket without the kind's keys is none"
    assert [c.values["BLOCK_SIZE_M"] for c in seeds.of(40, 4096, 1024, None)][:2] == [32, 64]
    with pytest.raises(ResolveError, match="no default file for gfx950"):
        Seeds(tmp_path, "gfx950", A16W16)


@pytest.mark.parametrize(
    ("kind", "target", "key", "legal"),
    [
        ("a16w16", H200, "BLOCK_SIZE_M", {16, 32, 64}),
        ("a16w16", H200, "waves_per_eu", {None}),  # keys of AMD's are left out on other chips,
        ("batched_bf16", H200, "waves_per_eu", {0}),  # but for what the kernel itself has as a parameter
        ("a8w8_blockscale", MI355X, "BLOCK_SIZE_K", {128}),
        ("a4w4", MI355X, "BLOCK_SIZE_K", {256, 512, 1024}),
        ("batched_a8w8", MI355X, "NUM_KSPLIT", {None}),  # it has no split-K
    ],
)
def test_values_are_those_that_kind_and_chip_take(kind: str, target: Target, key: str, legal: set[Any]) -> None:
    found = space.candidates(BY_NAME[kind], problem(kind, gfx=target.gfx, B=4), target, as_given)
    assert {c.values.get(key) for c in found} == legal


def test_keys_of_another_bucket_are_its_own() -> None:
    there = values(amd=True, kpack=2, _note="why")
    assert not AMD_ONLY & set(portable(there, A16W16, "90"))
    assert {"kpack", "_note"}.isdisjoint(portable(there, A16W16, "gfx950"))


def test_what_the_wrapper_makes_equal_is_one_candidate() -> None:
    p = problem()
    found = space.candidates(A16W16, p, MI355X, lambda given: {**given, "NUM_KSPLIT": 1})
    names = {tuple(sorted((k, str(v)) for k, v in c.values.items() if k != "NUM_KSPLIT")) for c in found}
    assert len(names) == len(found)
    for rows, equal in ((64, True), (16, False)):  # one row of tiles has no order
        pair = [config_of({**values(rows), "GROUP_SIZE_M": group}) for group in (1, 8)]
        assert (len(space.distinct(pair, p, as_given)) == 1) is equal


def test_seeds_are_varied_by_one_knob_and_the_list_is_kept_short() -> None:
    seed = config_of(values(32, 64, 128, amd=True))
    near = list(space.variations(A16W16, seed, MI355X))
    assert all(sum(c.values[k] != seed.values[k] for k in seed.values) == 1 for c in near)
    assert len(space.candidates(A16W16, problem(), MI355X, as_given, [seed], most=100)) == 100


@pytest.mark.parametrize(
    ("config", "target"),
    [
        (values(256, 64), MI355X),  # the tile is twice the output
        (values(64, 64, 1024, NUM_KSPLIT=2), MI355X),  # a split has less than one step
        (values(64, 256, 512, num_stages=3, num_warps=8), MI355X),  # too much shared memory
        (values(64, 256, 64, num_warps=1), H200),  # too many registers of a lane
    ],
)
def test_what_cannot_run_is_dropped_before_it_is_compiled(config: dict[str, Any], target: Target) -> None:
    p = problem(gfx=target.gfx)
    assert not space.is_legal(A16W16, p, config_of(config), target)
    assert space.is_legal(A16W16, p, config_of(values(64, 64, 64)), target)


@pytest.mark.parametrize(
    ("kind", "more", "kept", "copied"),
    [
        ("a16w16", {"num_stages": 1}, 32768, 32768),  # one operand at a time
        ("a16w16", {"num_stages": 2}, 40960, 81920),
        ("a16w16", {"num_stages": 3}, 81920, 122880),
        ("a8w8_blockscale_bpreshuffle", {"num_stages": 3}, 4096, 12288),  # W need not be there at all
        ("batched_a16w4", {"num_stages": 3}, 18432, 26624),  # X once
        ("a8w8_blockscale", {"NUM_KSPLIT": 8}, 16384, 16384),  # a loop of one step, a constant there, is none
        ("a8w8_blockscale", {"NUM_KSPLIT": 4}, 20480, 40960),
    ],
)
def test_shared_memory_is_never_overestimated(kind: str, more: dict[str, Any], kept: int, copied: int) -> None:
    """`kept`: a stage is in registers; `copied`: asynchronous copies. As Triton 3.6 and 3.9 take at least."""
    p = problem(kind, {"batched_a16w4": "batched_bf16"}.get(kind, kind), B=2)
    c = config_of(values(32, 128, 128, amd=True, **more))
    of = [space.least_shared_bytes(BY_NAME[kind], p, c, replace(MI355X, async_copy=a)) for a in (False, True)]
    assert of == [kept, copied]


def test_a_kind_of_the_same_family_has_its_own_problem() -> None:
    plain, packed = (problem(kind, "batched_bf16", B=2) for kind in ("batched_bf16", "batched_a16w4"))
    assert (plain.bits, packed.bits) == (16, 4)
    assert plain.group_name != packed.group_name
    with pytest.raises(UnsupportedError, match="K is 1000"):
        problem("a4w4", K=1000)


def elf(parts: dict[str, bytes]) -> bytes:
    """A 64-bit ELF file of these sections."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name in (*parts, ".shstrtab"))
    body, heads = b"", [struct.pack("<IIQQQQIIQQ", *[0] * 10)]
    for name, data in (*parts.items(), (".shstrtab", names)):
        at = names.index(name.encode() + b"\0")
        heads.append(struct.pack("<IIQQQQIIQQ", at, 1, 0, 0, 64 + len(body), len(data), 0, 0, 1, 0))
        body += data
    head = b"\x7fELF\x02\x01\x01" + bytes(9) + bytes(24) + struct.pack("<Q", 64 + len(body)) + bytes(10)
    return head + struct.pack("<HHH", 64, len(heads), len(heads) - 1) + body + b"".join(heads)


def test_numbers_and_code_are_read_from_a_compiled_file() -> None:
    note = b"\xb1.vgpr_spill_count\xcc\xc8\xab.vgpr_count\x40"
    data = elf({".note": note, ".text": b"code"})
    assert dict(sections(data))[".text"] == b"code"
    counts = [number_after(data, key) for key in (b".vgpr_spill_count", b".vgpr_count", b".agpr_count")]
    assert counts == [200, 64, None]
    with pytest.raises(ValueError, match="no 64-bit ELF file"):
        next(sections(b"text"))


CODE = """
import json, sys
from dataclasses import replace
from worker.triton_configs.kinds import BY_NAME
from worker.tuners.aiter_triton.source import AiterSource, CompileJob
from worker.tuners.aiter_triton.space import config_of, least_shared_bytes, problem_of
from worker.tuners.search.compiling import compile_candidate
from worker.tuners.search.source import copies_async, known
root, arch, configs, caller = sys.argv[1:]
target = known(int(arch) if arch.isdigit() else arch)
target = replace(target, async_copy=target.backend == "hip" and copies_async(arch))
key = {"M": 20, "N": 64, "K": 4096, "dtype": "torch.bfloat16", "outdtype": "torch.bfloat16"}
p = problem_of("a16w16", "a16w16", key, target.gfx)
for values in json.loads(configs):
    job = CompileJob(p.case, tuple(values.items()), caller)
    status, detail, f = compile_candidate(AiterSource(root, "a16w16"), target, job)
    least = least_shared_bytes(BY_NAME["a16w16"], p, config_of(values), target)
    print(json.dumps([status, detail, f and [f.shared_bytes, f.vgprs, f.spills, repr(f.same_as), least]]))
"""
needs_triton = pytest.mark.skipif(not find_spec("triton"), reason="there is no Triton")


def compiled(tree: Path, arch: str, *configs: dict[str, Any], caller: str = "") -> list[list[Any]]:
    """(status, detail, [LDS, registers, spills, what it is the same as, LDS that is expected at least]) of configs,
    compiled in a fresh process."""
    argv = [sys.executable, "-W", "ignore", "-c", CODE, str(tree), arch, json.dumps(configs), caller]
    env = {"TRITON_CACHE_DIR": str(tree / "cache"), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


@needs_triton
def test_facts_come_from_the_compiled_kernel(tmp_path: Path) -> None:
    tree = make(tmp_path, {"DEFAULT.json": {"any": values(amd=True)}}, "gfx950")
    plain, huge = values(32, 64, 128, amd=True), values(256, 256, 128, amd=True, num_stages=3, num_warps=8)
    more: list[dict[str, Any]] = [{"NUM_KSPLIT": 2}, {"GROUP_SIZE_M": 8}, {"num_stages": 1}, {"num_stages": 3}]
    good = compiled(tree, "gfx950", plain, *({**plain, **m} for m in more))
    for status, _, (lds, vgprs, _, _, least) in good:
        assert status == "ok"
        assert 0 < vgprs <= 512
        assert least <= lds <= 1.1 * least, "the compiler takes what is expected and little more"
    same = [facts[3] for _, _, facts in good]
    assert same[0] == same[2], "this kernel has no order of tiles: the same machine code, started alike"
    assert same[0] != same[1]
    broken, large = compiled(tree, "gfx950", {**plain, "BLOCK_SIZE_K": 24}, huge)
    assert broken[0] == "error"
    assert "power of 2" in broken[1]
    assert large[::2] == ["unsupported", None]
    assert "bytes of shared memory, 163840 are there" in large[1]


@needs_triton
@pytest.mark.full
def test_a_fused_operator_and_a_chip_of_nvidia_are_compiled_for_as_well(tmp_path: Path) -> None:
    fused = "fused_gemm_a16w16_quant_x"
    tree = make(tmp_path / "new", {"DEFAULT.json": {"any": values(amd=True)}}, "gfx950", fused=True)
    assert compiled(tree, "gfx950", values(amd=True), caller=fused)[0][0] == "ok"
    (missing,) = compiled(make(tmp_path / "old", {}, "gfx950"), "gfx950", values(amd=True), caller=fused)
    assert missing[0] == "unsupported"
    assert "no module aiter.ops.triton.gemm.fused" in missing[1]
    tree = make(tmp_path / "cuda", {"DEFAULT.json": {"any": values()}})
    good, foreign = compiled(tree, "90", values(32, 64, 64), values(32, 64, 64, amd=True))
    assert good[2][1:3] == [None, 0], "its files do not say"
    assert foreign[0] == "error"
    assert "waves_per_eu" in foreign[1]
