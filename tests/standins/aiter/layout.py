"""The two AITERs that a stand-in exists for, and what their scripts offer: one family of each kind of script."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Date:
    """One AITER. `new` tells the two apart where they act differently."""

    name: str
    commit: str
    new: bool


TREES: dict[str, Date] = {
    d.name: d for d in (Date("runbook", "da29487171", new=False), Date("newest", "e4048607a5", new=True))
}
"""`runbook`: the image that teams tuned in by hand. It is v0.1.10 (2026-01) with the a4w4 script of 2025-12, since its
package and scripts came from two trees, and it needs all three workarounds. `newest`: of 2026-08-22."""
_GEMM = ["kernelId", "splitK", "us", "kernelName", "tflops", "bw", "errRatio"]
_MOE_KEY = [
    "token", "model_dim", "inter_dim", "expert", "topk", "act_type", "dtype", "q_dtype_a", "q_dtype_w", "q_type",
    "use_g1u1", "doweight_stage1",
]  # fmt: skip
_MOE = ["block_m", "ksplit", "us1", "kernelName1", "err1", "us2", "kernelName2", "err2", "us", "run_1stage"]


@dataclass(frozen=True, slots=True)
class Script:
    """One tuner script of a tree; `kernels` are (backend, prefix of the names, how many)."""

    name: str
    path: str
    tuner: str
    env_name: str
    untuned: str
    tuned: str
    key: list[str]
    result: list[str]
    kernels: list[tuple[str, str, int]]
    extra: tuple[str, ...] = ()
    four_bit: bool = False
    fmoe: bool = False
    gradlib: bool = False
    only_gfx: str = ""
    libtypes: bool = False
    preshuffle: bool = False
    part: str = ""
    """The template, where it is one of its own."""

    @property
    def module(self) -> str:
        return f"module_gemm_{self.name}_tune"


def scripts(d: Date) -> list[Script]:
    """The scripts of the date's tree."""
    here = ["gfx"] if d.new else []
    mnk = [*here, "cu_num", "M", "N", "K"]
    lib = ["libtype", *_GEMM]
    libtype = '"--libtype", type=str, default="all", choices=["all", "ck", "cktile", "asm", "opus", "both"]'
    out = [
        Script(
            "a4w4_blockscale", "csrc/ck_gemm_a4w4_blockscale/gemm_a4w4_blockscale_tune.py", "GemmA4W4BlockScaleTuner",
            "AITER_CONFIG_GEMM_A4W4", "a4w4_blockscale_untuned_gemm.csv", "a4w4_blockscale_tuned_gemm.csv", mnk, _GEMM,
            [("ck", "a4w4_blockscale_", 5), ("f4asm", "", 0)], four_bit=True, only_gfx="gfx950",
        ),
        Script(
            "a8w8", "csrc/ck_gemm_a8w8/gemm_a8w8_tune.py", "GemmA8W8Tuner", "AITER_CONFIG_GEMM_A8W8",
            "a8w8_untuned_gemm.csv", "a8w8_tuned_gemm.csv", [*mnk, "q_dtype_w"], _GEMM,
            [("ck", "a8w8_rowwise_", 6)],
        ),
        Script(
            "a8w8_blockscale", "csrc/ck_gemm_a8w8_blockscale/gemm_a8w8_blockscale_tune.py", "GemmA8W8BlockScaleTuner",
            "AITER_CONFIG_GEMM_A8W8_BLOCKSCALE", "a8w8_blockscale_untuned_gemm.csv",
            "a8w8_blockscale_tuned_gemm.csv", mnk, lib,
            [("ck", "a8w8_blockscale_1x128x128_", 5), ("cktile", "a8w8_blockscale_cktile_", 3)],
            extra=(libtype, *(('"--preshuffle", action="store_true"',) if d.new else ())),
            libtypes=True, preshuffle=d.new,
        ),
        _gradlib(d, mnk),
        _moe(d, here),
    ]  # fmt: skip
    if d.new:
        out.append(_a16w16(mnk))
        name = "batched_gemm_a8w8_blockscale_mxscale"
        out.append(
            Script(
                name, "csrc/opus_gemm/opus_bmm_mxscale_tune.py", "OpusBmmMxscaleTuner", f"AITER_CONFIG_{name.upper()}",
                f"{name}_untuned.csv", f"{name}_tuned.csv", ["gfx", "b", "m", "n", "k"], ["libtype", *_GEMM], [],
                part="mxscale_script.py.j2",
            )
        )  # fmt: skip
    return out


_A16_KEY = ["bias", "dtype", "outdtype", "scaleAB", "bpreshuffle"]
_A16 = ["libtype", "solidx", "splitK", "us", "kernelName", "err_ratio", "tflops", "bw"]
_ALIASES = (
    '"--tuned_file", type=str, default=AITER_CONFIG_GEMM_BF16, dest="tune_file"',
    '"--input_file", type=str, default=None, dest="untune_file"',
)


def _gradlib(d: Date, mnk: list[str]) -> Script:
    kernels = [("hipblaslt", "Cijk_Alik_Bljk_", 5)]
    if not d.new:
        kernels += [("asm", "_ZN5aiter_bf16gemm_", 2), ("torch", "native", 1)]
    extra = (*_ALIASES, *(() if d.new else ('"--libtype", type=libtype_list, default=["all"]',)))
    return Script(
        "a16w16", "gradlib/gradlib/gemm_tuner.py", "GemmTuner", "AITER_CONFIG_GEMM_BF16", "bf16_untuned_gemm.csv",
        "bf16_tuned_gemm.csv", [*mnk, *_A16_KEY], _A16, kernels, extra=extra, gradlib=True, libtypes=not d.new,
    )  # fmt: skip


def _a16w16(mnk: list[str]) -> Script:
    kernels = [
        ("asm", "_ZN5aiter_bf16gemm_", 3), ("flydsl", "flydsl_bf16_", 3), ("torch", "native", 1),
        ("opus", "opus_gemm_", 2), ("triton", "auto", 1), ("skinny", "sol", 1),
    ]  # fmt: skip
    extra = (*_ALIASES, '"--libtype", type=libtype_list, default=["all"]')
    return Script(
        "a16w16", "csrc/gemm_a16w16/gemm_a16w16_tune.py", "GemmA16W16Tuner", "AITER_CONFIG_GEMM_BF16",
        "bf16_untuned_gemm.csv", "bf16_tuned_gemm.csv", [*mnk, *_A16_KEY], _A16, kernels, extra=extra, libtypes=True,
    )  # fmt: skip


def _moe(d: Date, here: list[str]) -> Script:
    result = [*_MOE, *(["xbf16", "flat"] if d.new else []), "tflops", "bw"]
    return Script(
        "fmoe", "csrc/ck_gemm_moe_2stages_codegen/gemm_moe_tune.py", "FmoeTuner", "AITER_CONFIG_FMOE",
        "untuned_fmoe.csv", "tuned_fmoe.csv", [*here, "cu_num", *_MOE_KEY], result,
        [("ck", "moe_ck2stages_", 4), ("asm", "_ZN5aiter_fmoe_", 2)], fmoe=True,
    )  # fmt: skip


def make_packages(folder: Path) -> None:
    """Make every folder a Python package."""
    for package in (folder, *(p for p in folder.rglob("*") if p.is_dir())):
        (package / "__init__.py").touch()
