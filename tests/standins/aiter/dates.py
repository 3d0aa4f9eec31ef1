"""Facts of AITER at each date that a stand-in exists for, read from the files at those tags.

The tags lie on release branches, so what counts is the tree at the tag, not its day. `TREES["newest"]` is
commit e4048607a5 (2026-08-22).
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Date:
    """One date. Flags are what the scripts' argparse offers; the rest is how they act."""

    name: str
    commit: str
    day: str
    base: bool = True  # aiter/utility/base_tuner.py exists
    sort_takes_value: bool = False
    timeout: int | str | None = "absent"  # "absent": there is no --timeout
    iters: bool = False
    run_config: bool = False
    gfx_column: bool = False
    exit_one: bool = False
    topk_fault: bool = False
    profile: str = "none"  # none, last (only the last batch survives), all
    pool: str = "join"  # join: a lost worker is awaited for ever; poll
    clock: str = "submission"  # a task's time-out counts from there, or from its start
    accelerator: bool = False  # [GPU Fault] lines
    compare_raises: bool = False  # with --verbose a wrong result is an exception, and its time is lost
    asm_dir: str = "gfx"  # what get_asm_dir() returns: hsa/<gfx>/ or hsa/
    tile_script: str = "tile_m"
    tile_table: str = "tile_m"
    k_trim: bool = False
    k_layout_sound: bool = False
    lock_detects_dead: bool = False
    q_dtype_a8w8: bool = False
    libtype_blockscale: bool = False
    libtype_bpreshuffle: bool = False
    preshuffle_flag: bool = False
    bpreshuffle_script: bool = True
    moe_script: str = "hsa/gfx950/fmoe_2stages/tune.py"
    a16w16_script: bool = False


_V015 = Date("v0.1.5", "d4ea3cf1d6", "2025-08", base=False, bpreshuffle_script=False)
_V017 = Date("v0.1.7.post5", "22122345c0", "2025-12-08", topk_fault=True, profile="last", tile_table="tile_M")
_V018 = replace(_V017, name="v0.1.8", commit="9402062ebd", day="2025-12-17", profile="all", libtype_bpreshuffle=True)
_V0110 = replace(
    _V018,
    name="v0.1.10",
    commit="da29487171",
    day="2026-01-15",
    timeout=None,
    iters=True,
    pool="poll",
    asm_dir="plain",
    tile_script="tile_M",
    q_dtype_a8w8=True,
    libtype_blockscale=True,
    moe_script="csrc/ck_gemm_moe_2stages_codegen/gemm_moe_tune.py",
)
_V0113 = replace(
    _V0110,
    name="v0.1.13",
    commit="cdcfa833bd",
    day="2026-05-01",
    sort_takes_value=True,
    run_config=True,
    gfx_column=True,
    exit_one=True,
    topk_fault=False,
    accelerator=True,
    asm_dir="gfx",
    k_trim=True,
    preshuffle_flag=True,
    bpreshuffle_script=False,
)
_NEWEST = replace(
    _V0113,
    name="newest",
    commit="e4048607a5",
    day="2026-08-22",
    timeout=1800,
    clock="task",
    k_layout_sound=True,
    compare_raises=True,
    lock_detects_dead=True,
    a16w16_script=True,
)

TREES: dict[str, Date] = {d.name: d for d in (_V015, _V017, _V018, _V0110, _V0113, _NEWEST)}
"""Stand-ins by name, oldest first."""

SUITE_DATES = ("v0.1.5", "v0.1.8", "v0.1.10", "v0.1.13", "newest")
"""The dates that the shape suite is run on."""
