"""Known faults of kernels, GPUs and of AITER's pool of processes. Ordered: the cause before what follows from it."""

from __future__ import annotations

from worker.tuners.aiter.known_issues.pattern import Pattern, Source

MP = "aiter/utility/mp_tuner.py"
BASE = "aiter/utility/base_tuner.py"
A4 = "csrc/ck_gemm_a4w4_blockscale/gemm_a4w4_blockscale_tune.py"
A4_CK = "csrc/ck_gemm_a4w4_blockscale/include/gemm_a4w4_blockscale_common.cuh"
HIP = "csrc/include/aiter_hip_common.h"

_ALONE = (
    "The shape in flight runs alone next and goes on without the candidate that was at work, which this slot leaves "
    "out for seven days, with a reproduction written down; where a second slot can try it, that decides."
)

FAULTS: tuple[Pattern, ...] = (
    Pattern(
        "memory_access_fault",
        "A kernel read or wrote outside its memory and the GPU ended its process",
        r"Memory access fault by GPU (?P<gpu>node-\d+).*? on address (?P<address>0x[0-9a-fA-F]+)",
        "fault",
        "shape",
        f"AITER up to 2025-12-29 waits for ever for the process that died, later versions until --timeout: the attempt "
        f"is ended as soon as the line appears. {_ALONE} It is the GPU's fault only if shapes that pass "
        f"elsewhere fault "
        "there too (three faults over two such shapes, or a failed canary).",
        "A kernel made an access to {address} that the GPU does not allow. If N is not a multiple of 128 (N=576, say) "
        "this is known of ASM and CK kernels; leave the shape out or pad N. Report it to ROCm/aiter with the one-row "
        "CSV that comes with this failure. If every shape faults on one GPU, the GPU is the suspect.",
        "Memory access fault by GPU node-2 (Agent handle: 0x55f1a3c2e0b0) on address 0x7f2c4a600000. Reason: Unknown.",
        (
            Source(MP, "pool.join()", "v0.1.5", "v0.1.8", "code"),
            Source(MP, "gpu_id = GPUIDMap[pid]", "v0.1.9.post1", "newest", "code"),
        ),
        origin="the HSA runtime of ROCm",
        runbook=("N=576 GPU faults", "mp=8 GPU memory faults", "Node 1 GPU health"),
    ),
    Pattern(
        "gpu_fault",
        "The GPU refused an access of a kernel and AITER gave the shape up",
        r"\[GPU Fault\].*?Task (?P<task>\d+) failed with (?P<error>\w+)|an illegal memory access was encountered",
        "fault",
        "shape",
        f"AITER restarts its pool and gives all candidates of the shape up; the attempt is ended instead. {_ALONE}",
        "A kernel made an illegal access. Report it to ROCm/aiter with the one-row CSV.",
        "\x1b[1;31m[GPU Fault]\x1b[0m Task 3 failed with AcceleratorError: HIP error: an illegal memory access was "
        "encountered",
        (Source(MP, "[GPU Fault]\x1b[0m Task {} failed with {}: {}", "v0.1.12.post1"),),
    ),
    Pattern(
        "hip_call_failed",
        "A call of the HIP runtime failed inside a kernel's launcher",
        r"fail to call (?P<call>\S+).*?---> \[HIP error\]\((?P<error>[^)\n]*)",
        "fault",
        "image",
        "Up to v0.1.11 the process then exits with code 0 and AITER waits for it for ever, later it aborts: "
        "the attempt "
        f"is ended as a fault. {_ALONE}",
        "{call} failed: {error}. A kernel file (.co) that does not fit the chip or is missing, or a launch that the "
        "chip refuses. Check that hsa/<gfx> of the image has the file; use another image if it does not.",
        "[AITER] csrc/py_itfs_cu/asm_gemm_a4w4.cu:44 fail to call hipModuleLoad(&module, path) ---> [HIP "
        "error](file not found)",
        (
            Source(HIP, "fail to call {} ---> [HIP error]({})", "v0.1.5", "v0.1.10.post3"),
            Source(HIP, "fail to call {} ---> [HIP error](", "v0.1.12.post1"),
        ),
    ),
    Pattern(
        "hsa_error",
        "The GPU raised a hardware exception",
        r"HSA_STATUS_ERROR\w*|hipErrorLaunchFailure|unspecified launch failure|GPU coredump",
        "fault",
        "shape",
        _ALONE,
        "The GPU stopped on an exception. If other shapes fault on this GPU as well, look at its error counters "
        "(`gemmfleet nodes check`).",
        ":0:rocdevice.cpp:2984: Callback: Queue 0x7f3c aborting with error : HSA_STATUS_ERROR_EXCEPTION: An HSAIL "
        "operation resulted in a hardware exception.",
        (Source(MP, "torch.cuda.synchronize()", "v0.1.5", "newest", "code"),),
        origin="the HSA runtime of ROCm",
    ),
    Pattern(
        "out_of_memory",
        "The GPU's memory was not enough",
        r"(?:HIP|CUDA) out of memory|hipErrorOutOfMemory|OutOfMemoryError|HSA_STATUS_ERROR_OUT_OF_RESOURCES",
        "oom",
        "shape",
        "The shape runs again alone on its GPU. AITER keeps rotating copies of the operands in up to 90 % of the free "
        "memory, so another process on the same GPU is enough to cause this.",
        "Not enough GPU memory. See that nothing else runs on the GPU (`gemmfleet nodes check` lists its processes), "
        "give one slot per GPU, and lower --iters (fewer copies of the operands are rotated).",
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 8.00 GiB. GPU 0 has a total capacity of "
        "287.98 GiB",
        (
            Source(MP, "except RuntimeError as e", "v0.1.5", "newest", "code"),
            Source(MP, '"out of memory" in str(e).lower()', "v0.1.9.post1", "newest", "code"),
        ),
        origin="torch",
    ),
    Pattern(
        "killed",
        "The kernel of the host killed the process",
        r"^(?:.*: line \d+: +\d+ )?Killed\b|oom-kill|Out of memory: Killed process",
        "oom",
        "setup",
        "Counted as out of memory of the host; the shape runs again alone.",
        "The process got SIGKILL: most often the host, or the container's limit, ran out of memory. Give the container "
        "more (docker.memory), or fewer slots per node.",
        "/code/tune.sh: line 12:    81 Killed                  python3 gemm_a4w4_blockscale_tune.py",
        (Source(MP, "mp.Pool(", "v0.1.5", "newest", "code"),),
        exits=(-9, 137),
        origin="the Linux kernel",
    ),
    Pattern(
        "mapping_error",
        "A process of AITER's pool died, and its replacement is not in the pool's map",
        r"\[Mapping Error\] Task (?P<task>\d+)",
        "fault",
        "shape",
        "Follows a process that died without a word. AITER asks the replacement again and again (seen: 50 minutes at "
        f"600 % CPU) until --timeout: the attempt is ended at once. {_ALONE}",
        "A kernel killed its process, and AITER's pool cannot go on without it. What was measured before is kept; the "
        "shapes that were not reached run again.",
        "[aiter] [Mapping Error] Task 4 - Process PID not in GPU map: KeyError - 1234",
        (
            Source(MP, "[Mapping Error] Task {} - Process PID not in GPU map (triggering pool restart): {} - {}",
                   "v0.1.9.post1", "v0.1.12.post1"),
            Source(MP, "[Mapping Error] Task {} - Process PID not in GPU map: {} - {}", "v0.1.13"),
        ),
    ),
    Pattern(
        "pool_livelock",
        "AITER's pool of processes is stuck",
        r"\[!\] (?P<count>\d+) (?:consecutive )?tasks timed out \(",
        "hang",
        "shape",
        f"AITER gives all candidates of the shape up and restarts its pool; the attempt is ended instead. {_ALONE}",
        "Candidates hang one after the other on this GPU. If other shapes hang there too, the GPU is the suspect, and "
        "its slot is put aside after a failed canary.",
        "[!] 1 consecutive tasks timed out (>= 1/1 GPUs likely stuck)",
        (
            Source(MP, "[!] {} tasks timed out (all {} GPUs likely stuck)", "v0.1.9.post1", "v0.1.12.post1"),
            Source(MP, "[!] {} consecutive tasks timed out (>= {}/{} GPUs likely stuck)", "v0.1.13"),
        ),
    ),
    Pattern(
        "hang",
        "A candidate did not come back",
        r"\[!\] Task (?P<task>\d+) timed out after (?P<after>[\d.]+)s \(limit: (?P<limit>\d+)s\)"
        r"|no sign of progress for (?P<quiet>[\d.]+) s|the shape took longer than (?P<most>[\d.]+) s",
        "hang",
        "shape",
        "AITER before 2025-12-30 has no time-out: the watchdog of gemmfleet ends the attempt. With one GPU a process, "
        f"AITER drops all candidates of the shape with the one that hangs. {_ALONE}",
        "Either a kernel hangs on this shape, or the shape needs longer than it was given: then raise --tuner-timeout. "
        "AITER up to 2026-07 counts its own time-out from when a batch begins, which gemmfleet allows for.",
        "[!] Task 0 timed out after 61.0s (limit: 60s) - likely GPU hang or infinite loop",
        (Source(MP, "[!] Task {} timed out after {}s (limit: {}s) - likely GPU hang", "v0.1.9.post1"),),
    ),
    Pattern(
        "process_died",
        "The tuner's process died by a signal",
        r"Fatal Python error: (?P<what>Segmentation fault|Aborted|Bus error|Illegal instruction)"
        r"|!Process killed by signal (?P<signal>\d+)|run GemmTuner process exitcode is "
        r"+-(?P<exit>\d+)|Segmentation fault \(core dumped\)"
        r"|the process of candidate (?P<candidate>.+?) died|process was ended by signal (?P<by>\d+)",
        "fault",
        "shape",
        f"{_ALONE} Wrappers (gradlib) start such a process again up to 30 times and then exit with 0: they are "
        f"read line "
        "by line and never by their exit code.",
        "The process died inside a kernel or a library. Report it to ROCm/aiter with the one-row CSV.",
        "Fatal Python error: Segmentation fault",
        (
            Source("gradlib/gradlib/gemm_tuner.py", "!Error when run GemmTuner process exitcode is ", "v0.1.7.post5",
                   "v0.1.10.post3"),
            Source("gradlib/gradlib/gemm_tuner.py", "!Process killed by signal {}, retrying ({}/{})", "v0.1.12.post1"),
        ),
        exits=(-11, -6, -7, -4, 139, 134, 135, 132),
        origin="Python, the shell and AITER's wrappers",
    ),
    Pattern(
        "unhealthy_gpu",
        "The driver reports an error of the GPU",
        r"amdgpu.*(?:GPU reset|ring \S+ timeout|uncorrectable|RAS)|uncorrectable hardware errors detected",
        "fault",
        "slot",
        "Counts as evidence against the slot: a canary runs, and a failed one puts the slot aside.",
        "The GPU itself reports errors. Drain the node (`gemmfleet nodes drain`), look at `amd-smi metric "
        "--ecc`, reset "
        "or replace the GPU.",
        "amdgpu 0000:c1:00.0: amdgpu: 1 uncorrectable hardware errors detected in gfx block",
        (Source(MP, "torch.cuda.set_device(device)", "v0.1.5", "newest", "code"),),
        origin="the amdgpu driver",
        runbook=("Node 1 GPU health",),
    ),
)  # fmt: skip
"""Faults that end a process, or ought to."""

RESULTS: tuple[Pattern, ...] = (
    Pattern(
        "wrong_results",
        "No candidate gave a right result",
        r"no valid candidate found for (?P<key>.+?), please check|No kernel can be used for (?P<info>.+)",
        "no_candidate",
        "shape",
        "The profile says why: candidates beyond the error limit make it `wrong_result`, none that could run "
        "`no_candidate`, at every version (--verbose is left out, with which AITER since v0.1.15 counts wrong values "
        "as not run). Final; no second try elsewhere.",
        "Every candidate of {key} failed or was beyond the error limit. If K is no multiple of 256 and the image is "
        "older than v0.1.14, the image lays the scales out wrongly for such K (K=29568, say): take a newer image. "
        "Else see the shape's rows in profile.csv.",
        "[aiter] error: no valid candidate found for (256, 64, 7168, 29568), please check the result or "
        "errRatio in all "
        "result file running with --profile_file",
        (
            Source(MP, "No kernel can be used for {}", "v0.1.5", "v0.1.5"),
            Source(BASE, "No kernel can be used for {}", "v0.1.7.post5"),
            Source(BASE, "error: no valid candidate found for {}, please check the result", "v0.1.7.post5"),
        ),
        runbook=("K=29568 unsupported",),
    ),
    Pattern(
        "topk_fault",
        "One shape without a kernel made AITER give up the rest of its batch",
        r"^choose 0 kernels",
        "",
        "image",
        "On such images one shape goes into a batch, and winners are chosen again from the profile.",
        "This version of AITER (2025-09-08 to 2026-04-15) reports later shapes of a batch as failed though it measured "
        "them. Nothing to do: their winners are taken from the profile.",
        "choose 0 kernels",
        (
            Source(BASE, "topk = len(filtered_time)", "v0.1.7.post5", "v0.1.12.post1", "code"),
            Source(BASE, "choose {} kernels", "v0.1.7.post5"),
        ),
    ),
    Pattern(
        "unsupported_gemm",
        "A kernel does not take this shape",
        r"This GEMM is not supported!|wrong! device_gemm with the specified compilation parameters does not support",
        "no_candidate",
        "nobody",
        "Expected: counted as a candidate that cannot run; the others decide. If no candidate runs, the shape ends as "
        "`no_candidate`.",
        "CK has no kernel for the shape. ASM often still works: this is no error.",
        "[AITER] RuntimeError: This GEMM is not supported!",
        (Source(A4_CK, "This GEMM is not supported!"),),
        runbook=("CK-Tile unsupported shapes",),
    ),
    Pattern(
        "zero_time",
        "A candidate's time came out as 0",
        r"but still get 0!|!!!! us = 0",
        "",
        "nobody",
        "A time of 0 never wins: such a row is not valid.",
        "The profiler saw no kernel of this candidate. Nothing to do, unless all candidates are 0: then roctracer does "
        "not work in the container.",
        "Warning: try run 3 times, but still get 0!",
        (
            Source(MP, "!!!! us = 0, rerun it ", "v0.1.5", "v0.1.5"),
            Source(MP, "Warning: try run {} times, but still get 0!", "v0.1.7.post5"),
        ),
    ),
)  # fmt: skip
"""What AITER says of results."""
