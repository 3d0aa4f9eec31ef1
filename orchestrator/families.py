"""Families and tuners by the name that a user typed, with a mistake as a message; the types of a family's operands; the
M that AITER looks up for a number of tokens.

AITER asks for the exact M, then for M padded finely, then for M padded coarsely. Source: `getPaddedM` in
csrc/py_itfs_cu/gemm_common.cu at e4048607a5, the same at v0.1.7. The batched families look up the exact M only. fmoe
takes its tokens to the next power of two below 32768 and to 32768 or 131072 from there (`get_padded_M`, fused_moe.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from orchestrator.command_hints import command
from orchestrator.errors import InputError
from worker.families import FAMILIES, Family
from worker.text import did_you_mean
from worker.tuners.catalog import Flag, TunerNotFoundError, TunerSpec, built_in, find_tuner, names


def get_family(name: str) -> Family:
    """The family of that name. Raises InputError with the nearest name if no family has it."""
    if name in FAMILIES:
        return FAMILIES[name]
    raise InputError(f"unknown family {name[:40]!r}{did_you_mean(name, FAMILIES)} (families: {', '.join(FAMILIES)})")


ELEMENT_TYPES = {
    "torch.bfloat16": ("bf16", 2.0), "torch.float16": ("fp16", 2.0), "torch.float32": ("fp32", 4.0),
    "torch.int8": ("int8", 1.0), "torch.float8_e4m3fn": ("fp8", 1.0), "torch.float8_e4m3fnuz": ("fp8", 1.0),
}  # fmt: skip
FORMAT_TYPES = {"mx4": ("fp4", 0.5), "block8": ("fp8", 1.0), "row8": ("int8", 1.0), "row16": ("bf16", 2.0)}
"""Types of families whose key names none."""


def family_type(family: Family) -> tuple[str, float] | None:
    """(type, bytes an element) of a family whose shapes are all of one type, None where the key names it."""
    return None if {"q_dtype_w", "dtype"} & set(family.key_names) else FORMAT_TYPES.get(family.format)


PadLevel = Literal["fine", "coarse"]
_STEPS = ((256, 16), (1024, 32), (4096, 64))
_LAST_STEP = 128
_TOP = 8192
_TOP_ABOVE_N = 4096
_TOKEN_TIERS = (131072, 32768)


def padded(m: int, n: int, level: PadLevel) -> int:
    """The M that AITER looks up for `m` tokens and `n` output features."""
    if level == "fine":
        step = next((s for most, s in _STEPS if m <= most), _LAST_STEP)
        return -(-m // step) * step
    if m > _TOP and n > _TOP_ABOVE_N:
        return _TOP
    return _power(m)


def _power(m: int) -> int:
    return 1 << (m - 1).bit_length()


def grid_point(key: tuple[int | str, ...], family: Family, level: PadLevel) -> tuple[int | str, ...]:
    """The key with its M on the grid; unchanged where the family is looked up by the exact M."""
    at = family.key_names.index(family.m_column)
    m = int(key[at])
    if family.two_stages:
        m = next((tier for tier in _TOKEN_TIERS if m >= tier), _power(m))
    elif not family.aiter.exact_m:
        m = padded(m, int(key[family.key_names.index("N")]), level)
    return (*key[:at], m, *key[at + 1 :])


def get_tuner(name: str, *, for_tune: bool = True) -> TunerSpec:
    """The tuner's spec. Raises InputError naming the ones there are; `for_tune`: also where another command runs it."""
    legal = names()
    try:
        spec = find_tuner(name)
    except TunerNotFoundError as e:
        if name in legal:  # its package is broken
            raise InputError(str(e)) from e
        raise InputError(f"unknown tuner {name!r}{did_you_mean(name, legal)} (there are: {', '.join(legal)})") from e
    if for_tune and spec.own_command:
        raise InputError(f"the tuner {name} has a command of its own: {command(spec.own_command)}")
    return spec


def flags() -> dict[str, tuple[Flag, tuple[str, ...]]]:
    """Flags of `tune` by option, each with the built-in tuners that have it."""
    by_option: dict[str, tuple[Flag, tuple[str, ...]]] = {}
    for name in built_in():
        for flag in find_tuner(name).flags:
            shared_flag, tuners = by_option.get(flag.option, (flag, ()))
            by_option[flag.option] = (shared_flag, (*tuners, name))
    return by_option


def in_words(tuners: tuple[str, ...]) -> str:
    """`the tuner aiter`, `the tuners torch and triton`."""
    *first, last = tuners
    return f"the tuners {', '.join(first)} and {last}" if first else f"the tuner {last}"


def check_family(spec: TunerSpec, family: str, options: Mapping[str, Any]) -> None:
    """Raise InputError if the tuner has no candidates for the family."""
    known = spec.families(options) if spec.families is not None else (family,)
    if family not in known:
        reason = spec.why_not.get(family)
        fault = f"the tuner {spec.name} does not tune family {family}; it tunes {', '.join(known)}"
        if reason:
            raise InputError(f"{fault}: {reason}")
        others = [name for name in built_in() if _measures_family(find_tuner(name), family)]
        raise InputError(f"{fault} (--tuner for {family}: {', '.join(others)})")


def _measures_family(spec: TunerSpec, family: str) -> bool:
    """True if a tuner has kernels for the family; `replay`, which is for tests, has none."""
    return bool(spec.software) and (spec.families is None or family in spec.families({}))


def check_tuner_options(spec: TunerSpec, options: Mapping[str, Any]) -> None:
    """Raise InputError where the tuner does not take these options, before anything starts."""
    try:
        spec.parse_options(options)
    except ValueError as e:
        own = {flag.option for flag in spec.flags}
        misplaced = []
        for option, (flag, tuners) in flags().items():
            if option in options and option not in own:
                misplaced.append(f"{flag.flag}: for {in_words(tuners)} only")
        raise InputError(f"{'; '.join(misplaced)}, and this is {spec.name}" if misplaced else str(e)) from e


GUIDE_FAMILY = "a4w4_blockscale"
"""Family of the FP4 guide: its shapes, the table that it prints, its published figures."""
