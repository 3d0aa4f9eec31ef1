"""Names, doubles and legality of configs, and the numbers a compiled file tells."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import pytest

from tests.standins.triton_tree import values
from worker.triton_configs.kinds import AMD_ONLY, BY_NAME
from worker.tuners.aiter_triton import space
from worker.tuners.aiter_triton.space import KindProblem, config_of, portable, problem_of
from worker.tuners.common.problem import UnsupportedError
from worker.tuners.search.compiling import number_after, sections
from worker.tuners.search.model import Knobs
from worker.tuners.search.source import Target, known

KEY: dict[str, int | str] = {"M": 64, "N": 512, "K": 1024, "dtype": "torch.bfloat16", "outdtype": "torch.bfloat16"}
MI355X, H200 = known("gfx950"), known(90)
A16W16 = BY_NAME["a16w16"]


def problem(kind: str = "a16w16", family: str = "a16w16", gfx: str = "gfx950", **key: int | str) -> KindProblem:
    return problem_of(kind, family, {**KEY, **key}, gfx)


def as_given(given: dict[str, Any]) -> dict[str, Any]:
    """A wrapper that rewrites nothing."""
    return dict(given)


def test_a_name_spells_every_knob() -> None:
    made = config_of(values(16, 64, 256, amd=True, cache_modifier=".cg", NUM_KSPLIT=4, kpack=2))
    assert made.name == "config_16x64x256_g1_k4_w4_s2_eu2_mfma16_cg_kpack=2"
    assert (made.split_k, made.simplicity) == (4, (4, 2, 2))
    assert made.knobs == Knobs(16, 64, 256, 1, 4, 4, 2, 2, 16, 2)
    assert config_of(made.values) == made


def test_amds_keys_are_left_out_on_other_chips() -> None:
    there = values(amd=True, kpack=2, _note="why")
    assert not AMD_ONLY & set(portable(there, A16W16, "90"))
    assert {"kpack", "_note"}.isdisjoint(portable(there, A16W16, "gfx950")), "they belong to their own bucket"
    for c in space.candidates(A16W16, problem(gfx="sm_90"), H200, as_given):
        assert not AMD_ONLY & set(c.values)
    assert set(A16W16.required) == set(space.knobs(A16W16, MI355X))


def test_a_key_that_the_kernel_has_as_a_parameter_stays_on_every_chip() -> None:
    kind = BY_NAME["batched_bf16"]
    assert kind.required_on("90") == tuple(k for k in kind.required if k != "matrix_instr_nonkdim")
    assert space.knobs(kind, H200)["waves_per_eu"] == (0,)
    found = space.candidates(kind, problem("batched_bf16", "batched_bf16", B=4, gfx="sm_90"), H200, as_given)
    assert found
    assert all(c.values["waves_per_eu"] == 0 for c in found)


@pytest.mark.parametrize(
    ("kind", "family", "steps"),
    [("a8w8_blockscale", "a8w8_blockscale", {128}), ("a4w4", "a4w4_blockscale", {256, 512, 1024})],
)
def test_steps_of_k_are_those_that_a_kind_takes(kind: str, family: str, steps: set[int]) -> None:
    found = space.candidates(BY_NAME[kind], problem(kind, family), MI355X, as_given)
    assert {c.values["BLOCK_SIZE_K"] for c in found} <= steps
    assert found


def test_a_kind_without_split_k_has_none() -> None:
    found = space.candidates(BY_NAME["batched_a8w8"], problem("batched_a8w8", "batched_a8w8", B=4), MI355X, as_given)
    assert not any("NUM_KSPLIT" in c.values for c in found)


def test_what_the_wrapper_makes_equal_is_one_candidate() -> None:
    def no_split(given: dict[str, Any]) -> dict[str, Any]:
        return {**given, "NUM_KSPLIT": 1}

    p = problem()
    found = space.candidates(A16W16, p, MI355X, no_split)
    names = {tuple(sorted((k, str(v)) for k, v in c.values.items() if k != "NUM_KSPLIT")) for c in found}
    assert len(names) == len(found)
    one_row = config_of(values(64, GROUP_SIZE_M=8))
    assert space.identity(one_row, p, as_given) == space.identity(config_of(values(64)), p, as_given)
    assert space.identity(config_of(values(16, GROUP_SIZE_M=8)), p, as_given) != space.identity(
        config_of(values(16)), p, as_given
    )


def test_seeds_are_varied_by_one_knob_and_the_list_is_kept_short() -> None:
    seed = config_of(values(32, 64, 128, amd=True))
    near = list(space.variations(A16W16, seed, MI355X))
    assert all(sum(c.values[k] != seed.values[k] for k in seed.values) == 1 for c in near)
    found = space.candidates(A16W16, problem(), MI355X, as_given, [seed], most=100)
    assert len(found) == 100


@pytest.mark.parametrize(
    ("config", "target", "words"),
    [
        (values(256, 64), MI355X, "twice the output"),
        (values(64, 64, 1024, NUM_KSPLIT=2), MI355X, "less than one step"),
        (values(64, 256, 512, num_stages=3, num_warps=8), MI355X, "bytes of shared memory or more"),
        (values(64, 256, 64, num_warps=1), H200, "registers of a lane"),
    ],
)
def test_what_cannot_run_is_dropped_before_it_is_compiled(config: dict[str, Any], target: Target, words: str) -> None:
    found = space.why_illegal(A16W16, problem(gfx=target.gfx), config_of(config), target)
    assert found is not None
    assert words in found


@pytest.mark.parametrize(
    ("kind", "stages", "kept", "copied"),
    [
        ("a16w16", 1, 32768, 32768),  # one operand at a time
        ("a16w16", 2, 40960, 81920),
        ("a16w16", 3, 81920, 122880),
        ("a8w8_blockscale_bpreshuffle", 3, 4096, 12288),  # W need not be there at all
        ("batched_a16w4", 3, 18432, 26624),  # X once
    ],
)
def test_shared_memory_is_never_overestimated_for_a_way_of_loading(
    kind: str, stages: int, kept: int, copied: int
) -> None:
    """`kept`: a stage is in registers; `copied`: asynchronous copies. As Triton 3.6 and 3.9 take at least."""
    family = {"batched_a16w4": "batched_bf16"}.get(kind, kind)
    p = problem(kind, family, B=2)
    c = config_of(values(32, 128, 128, amd=True, num_stages=stages))
    of = [space.least_shared_bytes(BY_NAME[kind], p, c, replace(MI355X, async_copy=a)) for a in (False, True)]
    assert of == [kept, copied]


def test_a_loop_of_one_step_is_none_where_the_number_of_steps_is_a_constant() -> None:
    def least(kind: str, split: int) -> int:
        c = config_of(values(32, 128, 128, amd=True, NUM_KSPLIT=split))
        return space.least_shared_bytes(BY_NAME[kind], problem(kind, kind), c, MI355X)

    assert [least("a16w16", split) for split in (8, 4)] == [40960, 40960]
    assert [least("a8w8_blockscale", split) for split in (8, 4)] == [16384, 20480]


def test_one_stage_of_a_large_tile_fits_where_two_do_not() -> None:
    one, two = (config_of(values(64, 256, 256, amd=True, num_stages=n, num_warps=8)) for n in (1, 2))
    target = replace(MI355X, async_copy=True)
    assert space.why_illegal(A16W16, problem(), one, target) is None
    assert space.why_illegal(A16W16, problem(), two, MI355X) is None
    assert "takes 327680 bytes" in str(space.why_illegal(A16W16, problem(), two, target))


def test_a_sample_is_drawn_by_its_seed_from_all_knobs() -> None:
    first = space.drawn(A16W16, problem(), MI355X, as_given, 50, "1")
    assert first == space.drawn(A16W16, problem(), MI355X, as_given, 50, "1")
    assert first != space.drawn(A16W16, problem(), MI355X, as_given, 50, "2")
    assert len(set(first)) == 50
    for key in ("waves_per_eu", "cache_modifier", "num_stages", "BLOCK_SIZE_M"):
        assert len({c.values[key] for c in first}) > 1


def test_a_kind_of_the_same_family_has_its_own_problem() -> None:
    plain, packed = (
        problem(B=2, family="batched_bf16", kind="batched_bf16"),
        problem("batched_a16w4", "batched_bf16", B=2),
    )
    assert (plain.bits, packed.bits) == (16, 4)
    assert plain.group_name != packed.group_name
    with pytest.raises(UnsupportedError, match="K is 1000"):
        problem("a4w4", "a4w4_blockscale", K=1000)


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
    assert (number_after(data, b".vgpr_spill_count"), number_after(data, b".vgpr_count")) == (200, 64)
    assert number_after(data, b".agpr_count") is None
    with pytest.raises(ValueError, match="no 64-bit ELF file"):
        next(sections(b"text"))
