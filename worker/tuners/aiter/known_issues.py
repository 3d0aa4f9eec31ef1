"""Known issues of AITER's tuners, of the images and machines that they run on; the search in a tuner's output.

Causes stand before consequences.
"""

from __future__ import annotations

import re

from worker.text import clean
from worker.tuners.aiter.known_issue import BASE, MP, Diagnosis, KnownIssue, UpstreamSource

A4 = "csrc/ck_gemm_a4w4_blockscale/gemm_a4w4_blockscale_tune.py"
CORE = "aiter/jit/core.py"
CHIP = "aiter/jit/utils/chip_info.py"
FP4 = "aiter/utility/fp4_utils.py"
A4_CK = "csrc/ck_gemm_a4w4_blockscale/include/gemm_a4w4_blockscale_common.cuh"
BATON = "aiter/jit/utils/file_baton.py"
HIP = "csrc/include/aiter_hip_common.h"
GRADLIB = "gradlib/gradlib/gemm_tuner.py"

_ENTRIES = (
    # of kernels, GPUs and the pool of processes
    KnownIssue(
        name="memory_access_fault",
        title="A kernel accessed memory that is not its own",
        regex=r"Memory access fault by GPU (?P<gpu>node-\d+).*? on address (?P<address>0x[0-9a-fA-F]+)",
        example="Memory access fault by GPU node-2 (Agent handle: 0x55f1a3c2e0b0) on address 0x7f2c4a600000.",
        printed_by="the HSA runtime of ROCm",
        reason="fault",
        blames="shape",
        why=(
            "The GPU forbids the access to {address}. ASM and CK kernels are known to do this if N is not a multiple "
            "of 128 (N=576, say)."
        ),
        action=(
            "Ends the attempt at this line; AITER waits for the dead process for ever up to 2025-12-29, until "
            "--timeout since. Blames the GPU only if shapes that pass elsewhere fault there too: three faults over two"
            " such shapes, or a failed canary."
        ),
        isolates=True,
        advice=(
            "Leave the shape out or pad N; report it to ROCm/aiter with the one-row CSV. If every shape faults on one "
            "GPU, suspect that GPU."
        ),
        runbook=("N=576 GPU faults", "mp=8 GPU memory faults", "Node 1 GPU health"),
        sources=(
            UpstreamSource(MP, "pool.join()", "v0.1.7.post5", "v0.1.8", kind="code"),
            UpstreamSource(MP, "gpu_id = GPUIDMap[pid]", "v0.1.9.post1", kind="code"),
        ),
    ),
    KnownIssue(
        name="gpu_fault",
        title="A kernel made an illegal access and AITER gave the shape up",
        regex=(
            r"\[GPU Fault\].*?Task (?P<task>\d+) failed with (?P<error>\w+)"
            r"|an illegal memory access was encountered"
        ),
        example=(
            "\x1b[1;31m[GPU Fault]\x1b[0m Task 3 failed with AcceleratorError: HIP error: an illegal memory access was "
            "encountered"
        ),
        reason="fault",
        blames="shape",
        why="The GPU refused the access.",
        action="Ends the attempt; AITER would restart its pool and drop all candidates of the shape.",
        isolates=True,
        advice="Report it to ROCm/aiter with the one-row CSV.",
        sources=(UpstreamSource(MP, "[GPU Fault]\x1b[0m Task {} failed with {}: {}", "v0.1.14"),),
    ),
    KnownIssue(
        name="hip_call_failed",
        title="A HIP call failed in a kernel's launcher",
        regex=r"fail to call (?P<call>\S+).*?---> \[HIP error\]\((?P<error>[^)\n]*)",
        example=(
            "[AITER] csrc/py_itfs_cu/asm_gemm_a4w4.cu:44 fail to call hipModuleLoad(&module, path) ---> [HIP "
            "error](file not found)"
        ),
        reason="fault",
        blames="image",
        why=(
            "{call} failed: {error}. A kernel file (.co) is missing or does not fit the chip, or the chip refuses the "
            "launch."
        ),
        action=(
            "Ends the attempt as a fault. Up to v0.1.11 the process exits with 0 and AITER waits for ever; later it "
            "aborts."
        ),
        isolates=True,
        advice="Check that `hsa/<gfx>` of the image has the file; if not, use another image.",
        sources=(
            UpstreamSource(HIP, "fail to call {} ---> [HIP error]({})", "v0.1.7.post5", "v0.1.10.post3"),
            UpstreamSource(HIP, "fail to call {} ---> [HIP error](", "v0.1.14"),
        ),
    ),
    KnownIssue(
        name="hsa_error",
        title="The GPU raised a hardware exception",
        regex=r"HSA_STATUS_ERROR\w*|hipErrorLaunchFailure|unspecified launch failure|GPU coredump",
        example=(
            "Queue 0x7f3c aborting with error : HSA_STATUS_ERROR_EXCEPTION: An HSAIL operation resulted in a hardware "
            "exception."
        ),
        printed_by="the HSA runtime of ROCm",
        reason="fault",
        blames="shape",
        why="An exception stopped a kernel.",
        isolates=True,
        advice="If other shapes fault on this GPU too, check its error counters (`gemmfleet nodes check`).",
        sources=(UpstreamSource(MP, "torch.cuda.synchronize()", kind="code"),),
    ),
    KnownIssue(
        name="out_of_memory",
        title="GPU memory ran out",
        regex=r"(?:HIP|CUDA) out of memory|hipErrorOutOfMemory|OutOfMemoryError|HSA_STATUS_ERROR_OUT_OF_RESOURCES",
        example="torch.OutOfMemoryError: HIP out of memory. Tried to allocate 8.00 GiB.",
        printed_by="torch",
        reason="oom",
        blames="shape",
        why="AITER rotates copies of the operands in up to 90 % of free memory: another process on the GPU is enough.",
        action="Runs the shape again alone.",
        advice=(
            "Keep other processes off the GPU (`gemmfleet nodes check` lists them), use one slot per GPU, lower "
            "--iters (fewer copies)."
        ),
        sources=(
            UpstreamSource(MP, "except RuntimeError as e", kind="code"),
            UpstreamSource(MP, '"out of memory" in str(e).lower()', "v0.1.9.post1", kind="code"),
        ),
    ),
    KnownIssue(
        name="killed",
        title="The host killed the process",
        regex=r"^(?:.*: line \d+: +\d+ )?Killed\b|oom-kill|Out of memory: Killed process",
        example="/code/tune.sh: line 12:    81 Killed                  python3 gemm_a4w4_blockscale_tune.py",
        printed_by="the Linux kernel",
        reason="oom",
        blames="setup",
        exit_codes=(-9, 137),
        why="SIGKILL: most often the host, or the container's limit, ran out of memory.",
        action="Counts it as out of host memory; runs the shape again alone.",
        advice="Give the container more memory (docker.memory), or the node fewer slots.",
        sources=(UpstreamSource(MP, "mp.Pool(", kind="code"),),
    ),
    KnownIssue(
        name="mapping_error",
        title="A process of AITER's pool died, and the pool does not know its replacement",
        regex=r"\[Mapping Error\] Task (?P<task>\d+)",
        example="[aiter] [Mapping Error] Task 4 - Process PID not in GPU map: KeyError - 1234",
        reason="fault",
        blames="shape",
        why=(
            "A kernel killed it without a message. AITER asks the replacement again and again until --timeout (seen: "
            "50 minutes at 600 % CPU)."
        ),
        action="Ends the attempt at once, keeps what was measured, runs shapes not reached again.",
        isolates=True,
        sources=(
            UpstreamSource(
                MP,
                "[Mapping Error] Task {} - Process PID not in GPU map (triggering pool restart): {} - {}",
                "v0.1.9.post1",
                "v0.1.10.post3",
            ),
            UpstreamSource(MP, "[Mapping Error] Task {} - Process PID not in GPU map: {} - {}", "v0.1.14"),
        ),
    ),
    KnownIssue(
        name="pool_livelock",
        title="AITER's pool is stuck",
        regex=r"\[!\] (?P<count>\d+) (?:consecutive )?tasks timed out \(",
        example="[!] 1 consecutive tasks timed out (>= 1/1 GPUs likely stuck)",
        reason="hang",
        blames="shape",
        why="Candidates hang one after the other.",
        action="Ends the attempt; AITER would restart its pool and drop all candidates of the shape.",
        isolates=True,
        advice="If other shapes hang on this GPU too, suspect it; a failed canary takes its slot out.",
        sources=(
            UpstreamSource(MP, "[!] {} tasks timed out (all {} GPUs likely stuck)", "v0.1.9.post1", "v0.1.10.post3"),
            UpstreamSource(MP, "[!] {} consecutive tasks timed out (>= {}/{} GPUs likely stuck)", "v0.1.14"),
        ),
    ),
    KnownIssue(
        name="hang",
        title="A candidate did not come back",
        regex=(
            r"\[!\] Task (?P<task>\d+) timed out after (?P<after>[\d.]+)s \(limit: (?P<limit>\d+)s\)"
            r"|no sign of progress for (?P<quiet>[\d.]+) s|the shape took longer than (?P<most>[\d.]+) s"
        ),
        example="[!] Task 0 timed out after 61.0s (limit: 60s) - likely GPU hang or infinite loop",
        reason="hang",
        blames="shape",
        rank="consequence",
        why=(
            "A kernel hangs, or the shape needs longer than it may take. With one GPU per process AITER drops all "
            "candidates of the shape. Its timeout exists since 2025-12-30, and counts from the batch's start up to "
            "2026-07."
        ),
        action="Ends the attempt by its own watchdog, which allows for that.",
        isolates=True,
        advice="If the shape is only slow, raise --tuner-timeout.",
        sources=(UpstreamSource(MP, "[!] Task {} timed out after {}s (limit: {}s) - likely GPU hang", "v0.1.9.post1"),),
    ),
    KnownIssue(
        name="process_died",
        title="A signal ended the tuner's process",
        regex=(
            r"Fatal Python error: (?P<what>Segmentation fault|Aborted|Bus error|Illegal instruction)"
            r"|!Process killed by signal (?P<signal>\d+)|run GemmTuner process exitcode is +(?P<exit>-?\d+)"
            r"|Segmentation fault \(core dumped\)|the process of candidate (?P<candidate>.+?) died"
            r"|process was (?:killed by|ended by signal) (?P<by>\w+)"
        ),
        example="Fatal Python error: Segmentation fault",
        printed_by="Python, the shell and AITER's wrappers",
        reason="fault",
        blames="shape",
        exit_codes=(-11, -6, -7, -4, 139, 134, 135, 132),
        why="A kernel or library crashed. Wrappers (gradlib) restart the tuner up to 30 times, then exit with 0.",
        action="Reads wrappers line by line, not their exit code.",
        isolates=True,
        advice="Report it to ROCm/aiter with the one-row CSV.",
        sources=(
            UpstreamSource(GRADLIB, "!Error when run GemmTuner process exitcode is ", "v0.1.7.post5", "v0.1.10.post3"),
            UpstreamSource(GRADLIB, "!Process killed by signal {}, retrying ({}/{})", "v0.1.14"),
        ),
    ),
    KnownIssue(
        name="unhealthy_gpu",
        title="The driver reports an error of the GPU",
        regex=r"amdgpu.*(?:GPU reset|ring \S+ timeout|uncorrectable|RAS)|uncorrectable hardware errors detected",
        example="amdgpu 0000:c1:00.0: amdgpu: 1 uncorrectable hardware errors detected in gfx block",
        printed_by="the amdgpu driver",
        reason="fault",
        blames="slot",
        why="Its hardware reports errors.",
        action="Counts it against the slot and runs a canary; if that fails, the slot is taken out.",
        advice="Drain the node (`gemmfleet nodes drain`), read `amd-smi metric --ecc`, reset or replace the GPU.",
        runbook=("Node 1 GPU health",),
        sources=(UpstreamSource(MP, "torch.cuda.set_device(device)", kind="code"),),
    ),
    # of images
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
            UpstreamSource(
                FP4,
                "bs_offs_0 * 2 * 16 * scaleN\n",
                "v0.1.7.post5",
                "v0.1.10.post3",
                kind="code",
            ),
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
            UpstreamSource("aiter/ops/gemm_op_a4w4.py", "A4W4 GEMM kernel is not supported on gfx942, but got {}!"),
        ),
    ),
    # of the setup and of the machine
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
    # of results and of the end of a batch
    KnownIssue(
        name="batch_error",
        title="An exception ended AITER's batches",
        regex=r"error in batch (?P<batch>\d+) of (?P<total>\d+)(?: after \d+ completed batches)?: (?P<what>.*)",
        example="[aiter] error in batch 2 of 4 after 1 completed batches: unexpected",
        reason="error",
        blames="nobody",
        rank="consequence",
        why="AITER stops at the first exception: {what}.",
        action="Runs shapes not reached again.",
        advice="The node's log has the traceback.",
        sources=(
            UpstreamSource(BASE, "error in batch {} of {}: {}", "v0.1.7.post5", "v0.1.10.post3"),
            UpstreamSource(BASE, "error in batch {} of {} after {} completed batches: {}", "v0.1.14"),
        ),
    ),
    KnownIssue(
        name="wrong_results",
        title="No candidate gave a right result",
        regex=r"no valid candidate found for (?P<key>.+?), please check|No kernel can be used for (?P<info>.+)",
        example="[aiter] error: no valid candidate found for (256, 64, 7168, 29568), please check the result",
        reason="no_candidate",
        blames="shape",
        rank="consequence",
        why=(
            "Every candidate of {key} failed or exceeded the error limit. Images before v0.1.14 lay out the scales "
            "wrongly if K is no multiple of 256 (K=29568, say)."
        ),
        action=(
            "Decides by the profile at every version: `wrong_result` if candidates exceeded the limit, `no_candidate` "
            "if none ran. Leaves out --verbose, with which AITER since v0.1.15 counts wrong values as not run. Final: "
            "no retry elsewhere."
        ),
        advice="For such K use a newer image; else see the shape's rows in profile.csv.",
        runbook=("K=29568 unsupported",),
        sources=(
            UpstreamSource(BASE, "No kernel can be used for {}", "v0.1.7.post5"),
            UpstreamSource(BASE, "error: no valid candidate found for {}, please check the result", "v0.1.7.post5"),
        ),
    ),
    KnownIssue(
        name="interrupted",
        title="The tuner was interrupted",
        regex=r"interrupted by user, tuning stopped",
        example="[aiter] interrupted by user, tuning stopped, 1 batches processed",
        reason="cancelled",
        blames="nobody",
        rank="consequence",
        why="Somebody stopped it.",
        action="Keeps what was measured.",
        advice="`gemmfleet resume` does the rest.",
        sources=(UpstreamSource(BASE, "interrupted by user, tuning stopped, {} batches processed", "v0.1.7.post5"),),
    ),
    KnownIssue(
        name="topk_fault",
        title="A shape without a kernel makes AITER drop the rest of its batch",
        regex=r"^choose 0 kernels",
        example="choose 0 kernels",
        reason="",
        blames="image",
        rank="remark",
        why="AITER reports later shapes as failed though it measured them.",
        action="Gives one shape a batch, and takes winners from the profile.",
        until="2026-04-15 (since 2025-09-08)",
        sources=(
            UpstreamSource(BASE, "topk = len(filtered_time)", "v0.1.7.post5", "v0.1.10.post3", kind="code"),
            UpstreamSource(BASE, "choose {} kernels", "v0.1.7.post5"),
        ),
    ),
    KnownIssue(
        name="unsupported_gemm",
        title="A kernel does not take this shape",
        regex=(
            r"This GEMM is not supported!"
            r"|wrong! device_gemm with the specified compilation parameters does not support"
        ),
        example="[AITER] RuntimeError: This GEMM is not supported!",
        reason="no_candidate",
        blames="nobody",
        rank="remark",
        why="CK has no kernel for it; ASM often still works. No error.",
        action="Counts a candidate that cannot run; if none runs, the shape ends as `no_candidate`.",
        runbook=("CK-Tile unsupported shapes",),
        sources=(UpstreamSource(A4_CK, "This GEMM is not supported!"),),
    ),
    KnownIssue(
        name="zero_time",
        title="A candidate's time is 0",
        regex=r"but still get 0!|!!!! us = 0",
        example="Warning: try run 3 times, but still get 0!",
        reason="",
        blames="nobody",
        rank="remark",
        why="The profiler saw no kernel.",
        action="Treats the row as invalid.",
        advice="If all candidates are 0, roctracer does not work in the container.",
        sources=(UpstreamSource(MP, "Warning: try run {} times, but still get 0!", "v0.1.7.post5"),),
    ),
)

_RANKS = ("cause", "consequence", "remark")

ISSUES: tuple[KnownIssue, ...] = tuple(sorted(_ENTRIES, key=lambda issue: _RANKS.index(issue.rank)))
"""All known issues, the one that explains most first."""

_ENDING = tuple(issue for issue in ISSUES if issue.isolates)
MAX_TEXT = 1_000_000


def ends_process(line: str) -> KnownIssue | None:
    """The known issue after which a tuner's process cannot go on, None if the line shows none."""
    plain = clean(line, 4000)
    return next((issue for issue in _ENDING if issue.search(plain)), None)


def diagnose(text: str, returncode: int | None) -> Diagnosis | None:
    """The known issue that best explains a tuner's end, None if there is none.

    `text`: the end of its output, both streams. `returncode`: as of subprocess (-N for a signal), None if gemmfleet
    ended it. A text has precedence over an exit code, except where the host killed the process.
    """
    plain = "\n".join(clean(line, 4000) for line in text[-MAX_TEXT:].splitlines())
    by_exit = next((i for i in ISSUES if returncode is not None and returncode in i.exit_codes), None)
    remark: Diagnosis | None = None
    for issue in ISSUES:
        m = issue.search(plain)
        if m is None:
            continue
        found = Diagnosis(issue, _line_at(plain, m), {k: v for k, v in m.groupdict().items() if v})
        if issue.rank != "remark":
            return found if by_exit is None or issue.rank == "cause" else Diagnosis(by_exit)
        remark = remark or found
    return Diagnosis(by_exit) if by_exit is not None else remark


def _line_at(text: str, m: re.Match[str]) -> str:
    start = text.rfind("\n", 0, m.start()) + 1
    end = text.find("\n", m.end())
    return clean(text[start : end if end >= 0 else len(text)], 400)
