"""Known faults of images."""

from __future__ import annotations

from worker.tuners.aiter.known_issues.faults import A4
from worker.tuners.aiter.known_issues.pattern import Pattern, Source

CORE = "aiter/jit/core.py"
CHIP = "aiter/jit/utils/chip_info.py"
FP4 = "aiter/utility/fp4_utils.py"

IMAGE: tuple[Pattern, ...] = (
    Pattern(
        "column_key_error",
        "The tuner and the list of ASM kernels spell a column differently",
        r"(?:KeyError: |error in batch \d+ of \d+.*: )'(?P<column>tile_?[mMnN])'",
        "error",
        "image",
        "The probe compares script and list before anything runs. Only where they differ is the script's copy changed "
        "(tile_column_case); changing the list where they agree breaks the tuner and the kernels' own code.",
        "The script reads {column}, which the list of kernels calls otherwise (2025-11-22 to 2025-12-19: v0.1.7.post5, "
        "v0.1.8), or two trees are mixed: a script of one date with the package of another. If somebody edited "
        "the list "
        "by hand, put it back.",
        "KeyError: 'tile_m'",
        (
            Source(A4, '"tile_m", "tile_n", "splitK"', "v0.1.5", "v0.1.8", "code"),
            Source(A4, '"tile_M", "tile_N", "splitK"', "v0.1.9.post1", "newest", "code"),
        ),
        origin="pandas",
        runbook=("Column name case",),
    ),
    Pattern(
        "missing_asm_list",
        "AITER does not find its list of ASM kernels, and tunes without them",
        r"ASM kernel list file not exist: (?P<path>\S+)",
        "error",
        "image",
        "The tuner goes on with CK alone, so its winners are not to be trusted: the probe finds out before, and "
        "gives a "
        "scratch copy the link that is missing (asm_dir_symlink).",
        "{path} does not exist. v0.1.10 (2026-01-13 to 2026-01-16) looks in hsa/ instead of hsa/<gfx>/. If "
        "another image "
        "says it, its hsa folder is not complete, or GPU_ARCHS names another chip.",
        "ASM kernel list file not exist: /app/aiter-test/hsa//f4gemm/f4gemm_bf16_per1x32Fp4.csv",
        (Source(A4, "ASM kernel list file not exist: {}"),),
        runbook=("ASM kernel path",),
    ),
    Pattern(
        "size_mismatch",
        "The reference result cannot be computed: K is no multiple of 256",
        r"The size of tensor a \((?P<a>\d+)\) must match the size of tensor b \((?P<b>\d+)\)",
        "error",
        "image",
        "Scales come padded to K={b}. Where the image does not cut them itself, the script's copy does (k_trim), such "
        "shapes run alone, and one 64x256x384 shape shows first whether kernels are right for such K.",
        "K={a} is no multiple of 256, and this image (before 2026-03-18, v0.1.12) pads the scales to {b}. "
        "Images before "
        "v0.1.14 also lay the scales out wrongly for such K, so that what they tune may be worth nothing there: "
        "better a "
        "newer image.",
        "RuntimeError: The size of tensor a (36224) must match the size of tensor b (36352) at non-singleton "
        "dimension 1",
        (
            Source(A4, "x_f32 = x_f32 * x_scales_f32", kind="code"),
            Source(FP4, "bs_offs_0 * 2 * 16 * scaleN\n", "v0.1.5", "v0.1.13", "code"),
        ),
        origin="torch",
        runbook=("K-alignment crash",),
    ),
    Pattern(
        "missing_module",
        "A Python module is missing in the image",
        r"(?:ModuleNotFoundError: No module named |ImportError: cannot import name )'(?P<module>[^']+)'",
        "error",
        "image",
        "Nothing can be tuned on the node with this image: its slots fail their canary.",
        "{module} is not in the image, or PYTHONPATH leads to a tree of another date. Where gluon is missing the image "
        "is older than v0.1.11; copying the file from a newer tree can fail on triton's version. Take another image.",
        "ModuleNotFoundError: No module named 'aiter.ops.triton.gluon'",
        (Source(A4, "from aiter.utility.mp_tuner import mp_tuner", kind="code"),),
        origin="Python",
        runbook=("Gluon missing in Docker",),
    ),
    Pattern(
        "binary_mismatch",
        "A built module does not fit the torch or ROCm of the image",
        r"undefined symbol: (?P<symbol>\S+)|error while loading shared libraries: (?P<library>\S+?):"
        r"|invalid device function|no kernel image is available",
        "error",
        "image",
        "Nothing can be tuned on the node with this image: its slots fail their canary.",
        "A .so was built for another torch, ROCm or chip. Clear the JIT folder (it is kept per image and chip), "
        "or build "
        "the image again with GPU_ARCHS set to this chip.",
        "ImportError: /root/.aiter/jit/module_gemm_a8w8.so: undefined symbol: _ZN3c1021throwNullDataPtrErrorEv",
        (Source(CORE, "importlib.import_module", kind="code"),),
        origin="the dynamic linker and HIP",
    ),
    Pattern(
        "jit_failed",
        "AITER could not compile a module of kernels",
        r"failed jit build \[(?P<module>[^\]]+)\]|build \[(?P<name>[^\]]+)\] under (?P<under>\S+) failed !!!!!!",
        "error",
        "image",
        "The module is compiled once per image and chip before anything is measured; where that fails, the "
        "family is not "
        "tuned on the node.",
        "The compiler's own words are above this line in the log. Missing submodule "
        "(3rdparty/composable_kernel), a full "
        "disk, or a compiler variable that the family needs (compiler_env in the inventory) are the usual causes.",
        "[aiter] build [module_gemm_a4w4_blockscale_tune] under /jit/build failed !!!!!!",
        (
            Source(CORE, "[aiter] build [{}] under {} failed !!!!!!"),
            Source(CORE, "\x1b[31mfailed jit build [{}]\x1b[0m"),
        ),
    ),
    Pattern(
        "unknown_chip",
        "AITER cannot tell which chip it runs on",
        r"Get GPU arch from rocminfo failed|No gfx arch found in rocminfo output|Unknown GPU architecture: "
        r"(?P<gfx>\S+)",
        "error",
        "slot",
        "The slot fails its canary.",
        "rocminfo does not name a chip that AITER knows. Check that /dev/kfd and /dev/dri/renderD* are in the "
        "container, "
        "and that GPU_ARCHS is not set to something else.",
        "RuntimeError: Get GPU arch from rocminfo failed: [Errno 2] No such file or directory: 'rocminfo'",
        (
            Source(CHIP, "Get GPU arch from rocminfo failed: {}"),
            Source(CHIP, "No gfx arch found in rocminfo output."),
            Source(CHIP, "Unknown GPU architecture: {}. "),
        ),
    ),
    Pattern(
        "wrong_chip",
        "The family is not for this chip",
        r"tuning is not supported in this chip (?P<gfx>\S*)|A4W4 GEMM kernel is not supported on",
        "unsupported",
        "setup",
        "Refused before the start where the chip is known; AITER itself tunes nothing and exits with 0.",
        "a4w4_blockscale needs gfx950 (MI350X, MI355X), and this is {gfx}. Give the run other nodes.",
        "tuning is not supported in this chip gfx942",
        (
            Source(A4, "tuning is not supported in this chip {}"),
            Source("aiter/ops/gemm_op_a4w4.py", "A4W4 GEMM kernel is not supported on gfx942, but got {}!"),
        ),
    ),
)  # fmt: skip
"""Faults of an image."""
