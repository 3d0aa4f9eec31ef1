"""Known issues of images, of a tuner's setup and of the machine around it."""

from __future__ import annotations

from worker.tuners.aiter.known_issue import BASE, MP, KnownIssue, UpstreamSource

A4 = "csrc/ck_gemm_a4w4_blockscale/gemm_a4w4_blockscale_tune.py"
CORE = "aiter/jit/core.py"
CHIP = "aiter/jit/utils/chip_info.py"
FP4 = "aiter/utility/fp4_utils.py"
BATON = "aiter/jit/utils/file_baton.py"
A4_OP = "aiter/ops/gemm_op_a4w4.py"

IMAGE: tuple[KnownIssue, ...] = (
    KnownIssue(
        name="column_key_error",
        title="Tuner and list of ASM kernels spell a column differently",
        regex=r"(?:KeyError: |error in batch \d+ of \d+.*: )'(?P<column>tile_?[mMnN])'",
        example="KeyError: 'tile_m'",
        printed_by="pandas",
        reason="error",
        blames="image",
        why=(
            "The script reads {column}, which the list spells otherwise; or trees are mixed, a script of one date with"
            " the package of another."
        ),
        action=(
            "Compares both before the start, and changes a copy of the script where they differ (tile_column_case). "
            "Changing the list where they agree breaks the tuner and the kernels' code."
        ),
        advice="Undo edits of the list.",
        until="2025-12-19 (since 2025-11-22: v0.1.7.post5, v0.1.8)",
        runbook=("Column name case",),
        sources=(
            UpstreamSource(A4, '"tile_m", "tile_n", "splitK"', "v0.1.7.post5", "v0.1.8", kind="code"),
            UpstreamSource(A4, '"tile_M", "tile_N", "splitK"', "v0.1.9.post1", kind="code"),
        ),
    ),
    KnownIssue(
        name="missing_asm_list",
        title="AITER does not find its list of ASM kernels",
        regex=r"ASM kernel list file not exist: (?P<path>\S+)",
        example="ASM kernel list file not exist: /app/aiter-test/hsa//f4gemm/f4gemm_bf16_per1x32Fp4.csv",
        reason="error",
        blames="image",
        rank="remark",
        why=(
            "{path} does not exist: v0.1.10 looks in hsa/ instead of `hsa/<gfx>/`; else hsa/ is incomplete, or "
            "GPU_ARCHS names another chip. AITER goes on with CK alone: do not trust its winners."
        ),
        action="Finds this before the start and adds the link in a scratch copy (asm_dir_symlink).",
        until="2026-01-16 (since 2026-01-13)",
        runbook=("ASM kernel path",),
        sources=(UpstreamSource(A4, "ASM kernel list file not exist: {}"),),
    ),
    KnownIssue(
        name="size_mismatch",
        title="K is no multiple of 256, and the reference cannot be computed",
        regex=r"The size of tensor a \((?P<a>\d+)\) must match the size of tensor b \((?P<b>\d+)\)",
        example="RuntimeError: The size of tensor a (36224) must match the size of tensor b (36352)",
        printed_by="torch",
        reason="error",
        blames="image",
        why=(
            "This image pads the scales of K={a} to {b}. Images before v0.1.14 also lay them out wrongly, so their "
            "results may be worth nothing."
        ),
        action=(
            "Trims the scales in a copy of the script (k_trim). A shape whose kernels are all wrong fails as "
            "`wrong_result`."
        ),
        advice="Use a newer image.",
        until="2026-03-18 (v0.1.12), the layout until v0.1.14",
        runbook=("K-alignment crash",),
        sources=(
            UpstreamSource(A4, "x_f32 = x_f32 * x_scales_f32", kind="code"),
            UpstreamSource(FP4, "bs_offs_0 * 2 * 16 * scaleN\n", "v0.1.7.post5", "v0.1.10.post3", kind="code"),
        ),
    ),
    KnownIssue(
        name="missing_module",
        title="A Python module is missing in the image",
        regex=r"(?:ModuleNotFoundError: No module named |ImportError: cannot import name )'(?P<module>[^']+)'",
        example="ModuleNotFoundError: No module named 'aiter.ops.triton.gluon'",
        printed_by="Python",
        reason="error",
        blames="image",
        why="{module} is not there, or PYTHONPATH leads to a tree of another date. Gluon exists since v0.1.11.",
        action="Fails the canary of all slots with this image.",
        advice="Use another image; a file copied from a newer tree can fail on triton's version.",
        runbook=("Gluon missing in Docker",),
        sources=(UpstreamSource(A4, "from aiter.utility.mp_tuner import mp_tuner", kind="code"),),
    ),
    KnownIssue(
        name="binary_mismatch",
        title="A built module does not fit the image",
        regex=(
            r"undefined symbol: (?P<symbol>\S+)|error while loading shared libraries: (?P<library>\S+?):"
            r"|invalid device function|no kernel image is available"
        ),
        example="ImportError: /root/.aiter/jit/module_gemm_a8w8.so: undefined symbol: _ZN3c1021throwNullDataPtrErrorEv",
        printed_by="the dynamic linker and HIP",
        reason="error",
        blames="image",
        why="A .so was built for another torch, ROCm or chip.",
        action="Fails the canary of all slots with this image.",
        advice="Clear the JIT folder (kept per image and chip), or rebuild the image with GPU_ARCHS set to this chip.",
        sources=(UpstreamSource(CORE, "importlib.import_module", kind="code"),),
    ),
    KnownIssue(
        name="jit_failed",
        title="AITER could not compile a module of kernels",
        regex=r"failed jit build \[(?P<module>[^\]]+)\]|build \[(?P<name>[^\]]+)\] under (?P<under>\S+) failed !!!!!!",
        example="[aiter] build [module_gemm_a4w4_blockscale_tune] under /jit/build failed !!!!!!",
        reason="error",
        blames="image",
        why=(
            "Mostly a missing submodule (3rdparty/composable_kernel), a full disk, or a compiler variable that the "
            "family needs (compiler_env in the inventory)."
        ),
        action="Compiles once per image and chip before measuring; does not tune the family on the node if that fails.",
        advice="Read the compiler's output above this line in the log.",
        sources=(
            UpstreamSource(CORE, "[aiter] build [{}] under {} failed !!!!!!"),
            UpstreamSource(CORE, "\x1b[31mfailed jit build [{}]\x1b[0m"),
        ),
    ),
    KnownIssue(
        name="unknown_chip",
        title="AITER cannot tell the chip",
        regex=(
            r"Get GPU arch from rocminfo failed|No gfx arch found in rocminfo output"
            r"|Unknown GPU architecture: (?P<gfx>\S+)"
        ),
        example="RuntimeError: Get GPU arch from rocminfo failed: [Errno 2] No such file or directory: 'rocminfo'",
        reason="error",
        blames="slot",
        why="rocminfo names none that AITER knows.",
        action="Fails the slot's canary.",
        advice="Check that the container has /dev/kfd and /dev/dri/renderD*, and that GPU_ARCHS names no other chip.",
        sources=(
            UpstreamSource(CHIP, "Get GPU arch from rocminfo failed: {}"),
            UpstreamSource(CHIP, "No gfx arch found in rocminfo output."),
            UpstreamSource(CHIP, "Unknown GPU architecture: {}. "),
        ),
    ),
    KnownIssue(
        name="wrong_chip",
        title="The family is not for this chip",
        regex=r"tuning is not supported in this chip (?P<gfx>\S*)|A4W4 GEMM kernel is not supported on",
        example="tuning is not supported in this chip gfx942",
        reason="unsupported",
        blames="setup",
        why="a4w4_blockscale needs gfx950 (MI350X, MI355X), and this is {gfx}. AITER tunes nothing and exits with 0.",
        action="Refuses it before the start if the chip is known.",
        advice="Give the run other nodes.",
        sources=(
            UpstreamSource(A4, "tuning is not supported in this chip {}"),
            UpstreamSource(A4_OP, "A4W4 GEMM kernel is not supported on gfx942, but got {}!"),
        ),
    ),
)
"""Faults of an image."""

SETUP: tuple[KnownIssue, ...] = (
    KnownIssue(
        name="bad_argument",
        title="AITER's script does not know an option",
        regex=(
            r"error: unrecognized arguments: (?P<arguments>.+)|error: argument (?P<argument>[^:\n]+): .+"
            r"|error: the following arguments are required: (?P<missing>.+)|--update_improved requires --compare"
        ),
        example="gemm_a4w4_blockscale_tune.py: error: unrecognized arguments: True",
        printed_by="argparse",
        reason="error",
        blames="setup",
        exit_codes=(2,),
        why="Options differ between versions: --sort is a flag up to 2026-01-26 and takes True or False since.",
        action="Passes only options that the script has, and reports which --tuner-arg it leaves out.",
        advice="Check --tuner-arg against this version (the probe lists its options).",
        sources=(
            UpstreamSource(BASE, '"--sort"', "v0.1.7.post5", kind="code"),
            UpstreamSource(BASE, "--update_improved requires --compare", "v0.1.14"),
        ),
    ),
    KnownIssue(
        name="no_device",
        title="No GPU can be used",
        regex=(
            r"No HIP GPUs are available|no ROCm-capable device is detected|hipErrorNoDevice|invalid device ordinal"
            r"|hipErrorInvalidDevice|Torch not compiled with CUDA enabled|Found no NVIDIA driver"
            r"|Unable to open /dev/kfd|ROCk module is NOT loaded"
        ),
        example="RuntimeError: No HIP GPUs are available",
        printed_by="torch and ROCm",
        reason="error",
        blames="slot",
        why="The container sees no GPU, or torch is built without ROCm.",
        action="Fails the slot's canary; tries again after a cool-down.",
        advice=(
            "Pass /dev/kfd and the slot's /dev/dri/renderD*, put the user in the groups video and render, run "
            "`rocminfo` on the node."
        ),
        sources=(UpstreamSource(MP, "torch.cuda.device_count()", kind="code"),),
    ),
    KnownIssue(
        name="jit_lock",
        title="AITER waits for a lock of its compiler",
        regex=r"waiting for baton release at (?P<lock>\S+)(?![\s\S]*(?:import \[|finish build \[))",
        example="[aiter] waiting for baton release at /root/.aiter/jit/build/lock_module_gemm_a4w4_blockscale_tune",
        reason="hang",
        blames="setup",
        why=(
            "The owner of {lock} was killed while compiling. AITER notices since 2026-07-09, but never with --network "
            "host."
        ),
        action=(
            "Gives every slot its own JIT folder, hostname and TMPDIR, and removes locks of dead owners before the "
            "start."
        ),
        advice="If nothing compiles there, remove the file.",
        until="2026-07-09, open with --network host",
        sources=(UpstreamSource(BATON, "waiting for baton release at {}"),),
    ),
    KnownIssue(
        name="jit_lock_broken",
        title="AITER removed a lock whose owner was dead",
        regex=r"broke stale lock at (?P<lock>\S+)",
        example="[aiter] [pid=71] broke stale lock at /jit/build/lock_module_x (dead/abandoned holder)",
        reason="",
        blames="nobody",
        rank="remark",
        why="The owner was killed while compiling; AITER compiles again.",
        sources=(UpstreamSource(BATON, "[pid={}] broke stale lock at {} (dead/abandoned holder)", "v0.1.20"),),
    ),
    KnownIssue(
        name="duplicate_rows",
        title="Two tuned tables have a row for the same shape",
        regex=r"Found (?P<count>\d+) duplicate shape entries during merge of '(?P<table>[^']+)'",
        example="RuntimeError: Found 4 duplicate shape entries during merge of 'a4w4_blockscale_tuned_gemm'.",
        reason="error",
        blames="setup",
        why="AITER refuses duplicates since 2026-04-01, and rewrites the tables while reporting them.",
        action="Clears inherited AITER_CONFIG_*, so these are the image's own tables.",
        advice="Replace the old table by the merged one; `gemmfleet db export` warns of duplicates.",
        sources=(UpstreamSource(CORE, "Found {} duplicate shape entries during merge of '{}'. ", "v0.1.14"),),
    ),
    KnownIssue(
        name="missing_input",
        title="AITER does not find the list of shapes",
        regex=r"Not exist (?:untuned|\S+_untuned_gemm\.csv) file: (?P<path>\S+)",
        example="AssertionError: Not exist untuned file: /node/0/in.csv",
        reason="error",
        blames="setup",
        why="{path}, written by gemmfleet, is gone.",
        advice="Is the node's folder cleaned during runs, or its disk full?",
        sources=(UpstreamSource(BASE, "Not exist untuned file: {}", "v0.1.7.post5"),),
    ),
    KnownIssue(
        name="legacy_table",
        title="A tuned table lacks a column",
        regex=r"""KeyError: ['\"](?:\[?'?)gfx|KeyError: .*not in index""",
        example="KeyError: 'gfx'",
        printed_by="pandas",
        reason="error",
        blames="setup",
        why="Tables from before 2026-04-17 have no gfx column, and this AITER does not add it.",
        action="Gives every group its own result files, so this is none of ours.",
        advice="Export the table again with `gemmfleet db export`.",
        until="2026-06-30",
        sources=(UpstreamSource(BASE, "self.tunedf[untunedf_cols]", "v0.1.7.post5", kind="code"),),
    ),
    KnownIssue(
        name="empty_shape",
        title="A shape without candidates ended AITER's batch",
        regex=(
            r"shape_grouped: group count \((?P<groups>\d+)\) != in_datas count"
            r"|error in batch \d+ of \d+.*list index out of range"
        ),
        example="AssertionError: shape_grouped: group count (3) != in_datas count (4)",
        reason="error",
        blames="image",
        why="The family has no kernel for this shape on this chip, or --libtype leaves none.",
        action="Gives such families one shape a batch, so no other is lost.",
        sources=(
            UpstreamSource(MP, "result.append(task_result[0])", "v0.1.9.post1", kind="code"),
            UpstreamSource(MP, "shape_grouped: group count ({}) != in_datas count ({})", "v0.1.14"),
        ),
    ),
    KnownIssue(
        name="disk_full",
        title="The disk is full",
        regex=r"No space left on device|Disk quota exceeded",
        example="OSError: [Errno 28] No space left on device: '/node/jit/build'",
        printed_by="Linux",
        reason="disk_full",
        blames="slot",
        why="There is no room for results or builds.",
        action="Gives the node no work until there is room.",
        advice="Make room (`gemmfleet runs prune` removes old runs there), or give the node another folder.",
        sources=(UpstreamSource(BASE, "to_csv(", "v0.1.7.post5", kind="code"),),
    ),
    KnownIssue(
        name="no_permission",
        title="A folder cannot be written",
        regex=r"PermissionError: \[Errno 13\][^\n]*?'(?P<path>[^'\n]+)'|Read-only file system",
        example="PermissionError: [Errno 13] Permission denied: '/opt/aiter/jit/build'",
        printed_by="Python",
        reason="error",
        blames="setup",
        why="{path} is not writable for the container's user.",
        action="Keeps AITER_JIT_DIR, HOME and TMPDIR in the node's folder: the cause is the image or a mount.",
        advice="Check docker.user and the mounts of the inventory.",
        sources=(UpstreamSource(CORE, "os.makedirs(bd_dir, exist_ok=True)", kind="code"),),
    ),
    KnownIssue(
        name="shell_quoting",
        title="A shell misread a pasted command line",
        regex=r"Ambiguous output redirect|Illegal variable name",
        example="Illegal variable name.",
        printed_by="csh",
        reason="error",
        blames="setup",
        why="A script of your own went through ssh to a node whose login shell is csh.",
        action="Sends scripts as files and runs them by path, so any shell will do.",
        advice="Send the script as a file and run that.",
        runbook=("SSH escaping", "Docker `$!` escaping"),
    ),
)
"""Faults of the setup and of the machine."""
