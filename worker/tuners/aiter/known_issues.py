"""Known issues of AITER's tuners, images and machines, and the search for them in a tuner's output.

To add one: add a `KnownIssue` here, before the issues that follow from it. Add its section to
docs/reference/known-issues.md, with a line of real output and what gemmfleet does about it. If AITER prints or causes
it, add it to tests/aiter/known_issues.md, which `make test-aiter AITER_GIT=PATH` compares with a clone.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from worker.text import clean

Blames = Literal["shape", "slot", "image", "setup", "nobody"]
FailureReason = Literal[
    "fault", "hang", "oom", "error", "disk_full", "cancelled", "no_candidate", "wrong_result", "unsupported", ""
]
"""A reason in gemmfleet's records; "" for an issue that does not end anything by itself."""
Rank = Literal["cause", "consequence", "remark"]
"""A cause explains a failure. A consequence explains it if no cause is found. A remark explains it only if nothing else
does, because it is about one candidate or about no failure at all."""

CANDIDATE_WARNING = "run gpu func warning"
"""AITER prints this before the exception of one candidate, and goes on with the next one."""
OWN_SHAPE_ADVICE = (
    "Every kernel takes this shape, so it is not to blame: the GPU, its driver or the image is. See dmesg and rocm-smi "
    "of the node, try the image on another GPU, or another image on this one."
)
"""Advice for a fault of one of gemmfleet's own tiny shapes."""


@dataclass(frozen=True, slots=True)
class KnownIssue:
    """One entry of the catalogue. `why` and `advice` may name groups of `regex` as {name}."""

    name: str
    title: str
    reason: FailureReason
    """The failure is recorded with this reason,"""
    blames: Blames
    """and with what is to blame."""
    regex: str
    """Finds it in output (multi-line; the first match counts)."""
    why: str
    """The cause, for the user."""
    advice: str = ""
    until: str = ""
    """The date or version up to which it occurs; "": still open."""
    rank: Rank = "cause"
    isolates: bool = False
    """It ends the process, and the candidate at work is to blame: it is blocked."""
    exit_codes: tuple[int, ...] = ()
    """These identify it even without text; -N for a signal."""

    def search(self, text: str) -> re.Match[str] | None:
        """The first match in the text."""
        return re.search(self.regex, text, re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A known issue met in a tuner's output. `line` shows it, "" where the exit code does."""

    issue: KnownIssue
    line: str = ""
    groups: Mapping[str, str] = field(default_factory=dict)

    @property
    def explanation(self) -> str:
        """Cause, advice and end of the issue, with the groups of the match filled in; a dash for one without a part."""
        sentences = [self.issue.why, self.issue.advice]
        if self.issue.until:
            sentences.append(f"Until {self.issue.until}.")
        return " ".join(filter(None, sentences)).format_map(defaultdict(lambda: "-", self.groups))

    @property
    def blames_image(self) -> bool:
        """Return whether the image failed, and not one candidate with its own kernel file."""
        return self.issue.blames == "image" and self.issue.rank == "cause" and not self.issue.isolates

    def detail(self, already_shown: str = "", *, own_shape: bool = False) -> str:
        """Text of a failure record: the title, the line (unless `already_shown` has it), the explanation.

        `own_shape`: it happened on a shape of gemmfleet's own that every kernel takes; no advice about the shape then.
        """
        line = f" ({self.line})" if self.line and self.line not in already_shown else ""
        explanation = OWN_SHAPE_ADVICE if own_shape and self.issue.blames == "shape" else self.explanation
        return f"{self.issue.title}{line}. {explanation}"


# fmt: off
_ENTRIES = (
    # of kernels, GPUs and the pool of processes
    KnownIssue(
        "memory_access_fault", "A kernel accessed memory that is not its own", "fault", "shape", isolates=True,
        regex=r"Memory access fault by GPU (?P<gpu>node-\d+).*? on address (?P<address>0x[0-9a-fA-F]+|\(nil\))",
        why=(
            "The GPU forbids the access to {address}. ASM and CK kernels are known to do this if N is not a multiple "
            "of 128 (N=576, say)."
        ),
        advice=(
            "Leave the shape out or pad N; report it to ROCm/aiter with the one-row CSV. If every shape faults on one "
            "GPU, suspect that GPU."
        ),
    ),
    KnownIssue(
        "gpu_hang", "The driver says that the GPU hangs", "hang", "shape", isolates=True,
        regex=r"HW Exception by GPU (?P<gpu>node-\d+).*reason ?: ?GPU Hang",
        why="A kernel did not end, and the driver resets {gpu}. Other programs on the GPU lose their work too.",
        advice="If other shapes hang on this GPU too, suspect it; a failed canary takes its slot out.",
    ),
    KnownIssue(
        "gpu_fault", "A kernel made an illegal access and AITER gave the shape up", "fault", "shape", isolates=True,
        regex=(
            r"\[GPU Fault\].*?Task (?P<task>\d+) failed with (?P<error>\w+)"
            r"|an illegal memory access was encountered"
        ),
        why="The GPU refused the access.",
        advice="Report it to ROCm/aiter with the one-row CSV.",
    ),
    KnownIssue(
        "out_of_memory", "GPU memory ran out", "oom", "shape",
        regex=(
            # torch, AITER's launchers, NCCL ("Cuda failure 2 '...'"), Triton ("Code: 2, Messsage: ...", spelt so)
            r"(?i:(?:HIP|CUDA)(?: error| failure)?[^\w\n]{0,4}(?:\d+ '|Code: \d+, Mess+age: )?out of memory)"
            r"|hipErrorOutOfMemory|hipErrorMemoryAllocation|OutOfMemoryError"
            r"|(?:BLAS|SPARSE)_STATUS_ALLOC_FAILED|HSA_STATUS_ERROR_OUT_OF_RESOURCES"
        ),
        why="AITER rotates copies of the operands in up to 90 % of free memory: another process on the GPU is enough.",
        advice=(
            "Keep other processes off the GPU (`gemmfleet nodes check -i INV` lists them), use one slot per GPU, "
            "lower --iters (fewer copies)."
        ),
    ),
    KnownIssue(
        "bad_kernel_file", "A candidate's own compiled file does not fit the chip", "error", "shape",
        regex=(
            r"(?:hipModuleLoad(?![^\n]*Success)|Triton Error \[)[^\n]*(?:\n[^\n]*){0,3}?"
            r"(?:hipErrorNoBinaryForGpu|[Uu]nable to find code object|device kernel image is invalid"
            r"|no kernel image is available)"
        ),
        why="The driver refused the kernel file of one candidate; other candidates have files of their own.",
        advice="If every candidate fails like this, the image was built for another chip.",
    ),
    KnownIssue(
        "hip_call_failed", "A HIP call failed in a kernel's launcher", "fault", "image", isolates=True,
        regex=r"fail to call (?P<call>\S+).*?---> \[HIP error\]\((?P<error>[^)\n]*)",
        why=(
            "{call} failed: {error}. A kernel file (.co) is missing or does not fit the chip, or the chip refuses the "
            "launch."
        ),
        advice="Check that `hsa/<gfx>` of the image has the file; if not, use another image.",
    ),
    KnownIssue(
        "hsa_error", "The GPU raised a hardware exception", "fault", "shape", isolates=True,
        regex=(
            r"HSA_STATUS_ERROR(?!_OUT_OF_RES)\w*|HW Exception by GPU|hipErrorLaunchFailure|unspecified launch failure"
            r"|GPU coredump"
        ),
        why="An exception stopped a kernel.",
        advice="If other shapes fault on this GPU too, check its error counters (`gemmfleet nodes check -i INV`).",
    ),
    KnownIssue(
        "killed", "The host killed the process", "oom", "setup", exit_codes=(-9, 137),
        regex=r"^(?:.*: line \d+: +\d+ )?Killed\b|oom-kill|Out of memory: Killed process",
        why="SIGKILL: most often the host, or the container's limit, ran out of memory.",
        advice="Give the container more memory (docker.memory), or the node fewer slots.",
    ),
    KnownIssue(
        "mapping_error", "A process of AITER's pool died, and the pool does not know its replacement", "fault", "shape",
        isolates=True,
        regex=r"\[Mapping Error\] Task (?P<task>\d+)",
        why=(
            "A kernel killed it without a message. AITER asks the replacement again and again until --timeout (seen: "
            "50 minutes at 600 % CPU)."
        ),
    ),
    KnownIssue(
        "pool_livelock", "AITER's pool is stuck", "hang", "shape", isolates=True,
        regex=r"\[!\] (?P<count>\d+) (?:consecutive )?tasks timed out \(",
        why="Candidates hang one after the other.",
        advice="If other shapes hang on this GPU too, suspect it; a failed canary takes its slot out.",
    ),
    KnownIssue(
        "hang", "A candidate did not come back", "hang", "shape", rank="consequence", isolates=True,
        regex=(
            r"\[!\] Task (?P<task>\d+) timed out after (?P<after>[\d.]+)s \(limit: (?P<limit>\d+)s\)"
            r"|Watchdog caught collective operation timeout"
            r"|no sign of progress for (?P<quiet>[\d.]+) s|the shape took longer than (?P<most>[\d.]+) s"
        ),
        why=(
            "A kernel hangs, or the shape needs longer than it may take. With one GPU per process AITER drops all "
            "candidates of the shape. Its timeout exists since 2025-12-30, and counts from the batch's start up to "
            "2026-07."
        ),
        advice="If the shape is only slow, raise --tuner-timeout.",
    ),
    KnownIssue(
        "binary_mismatch", "A built module does not fit the image", "error", "image",
        regex=(
            rf"^(?!.*{CANDIDATE_WARNING}).*?"
            r"(?:undefined symbol: (?P<symbol>\S+)|error while loading shared libraries: (?P<library>\S+?):"
            r"|[Ii]nvalid device function|no kernel image is available|device kernel image is invalid"
            r"|hipErrorNoBinaryForGpu|[Uu]nable to find code object|rocBLAS error: Cannot read (?P<kernels>\S+):)"
        ),
        why="A library or its kernels were built for another torch, ROCm or chip.",
        advice="Clear the JIT folder (kept per image and chip), or rebuild the image with GPU_ARCHS set to this chip.",
    ),
    KnownIssue(
        "process_died", "A signal ended the tuner's process", "fault", "shape",
        isolates=True, exit_codes=(-11, -6, -7, -4, 139, 134, 135, 132),
        regex=(
            r"Fatal Python error: (?P<what>Segmentation fault|Aborted|Bus error|Illegal instruction)"
            r"|!Process killed by signal (?P<signal>\d+)|run GemmTuner process exitcode is +(?P<exit>-?\d+)"
            r"|Segmentation fault \(core dumped\)|the process of candidate (?P<candidate>.+?) died"
            r"|process was (?:killed by|ended by signal) (?P<by>\w+)"
        ),
        why="A kernel or library crashed. Wrappers (gradlib) restart the tuner up to 30 times, then exit with 0.",
        advice="Report it to ROCm/aiter with the one-row CSV.",
    ),
    KnownIssue(
        "unhealthy_gpu", "The driver reports an error of the GPU", "fault", "slot",
        regex=r"amdgpu.*(?:GPU reset|ring \S+ timeout|uncorrectable|RAS)|uncorrectable hardware errors detected",
        why="Its hardware reports errors.",
        advice=(
            "Drain the node (`gemmfleet nodes drain NODE --run RUN`), read `amd-smi metric --ecc`, reset or replace the"
            " GPU."
        ),
    ),
    # of images
    KnownIssue(
        "column_key_error", "Tuner and list of ASM kernels spell a column differently", "error", "image",
        regex=r"(?:KeyError: |error in batch \d+ of \d+.*: )'(?P<column>tile_?[mMnN])'",
        why=(
            "The script reads {column}, which the list spells otherwise; or trees are mixed, a script of one date with"
            " the package of another."
        ),
        advice="Undo edits of the list.",
        until="2025-12-19 (since 2025-11-22: v0.1.7.post5, v0.1.8)",
    ),
    KnownIssue(
        "missing_asm_list", "AITER does not find its list of ASM kernels", "error", "image", rank="remark",
        regex=r"ASM kernel list file not exist: (?P<path>\S+)",
        why=(
            "{path} does not exist: v0.1.10 looks in hsa/ instead of `hsa/<gfx>/`; else hsa/ is incomplete, or "
            "GPU_ARCHS names another chip. AITER goes on with CK alone: do not trust its winners."
        ),
        until="2026-01-16 (since 2026-01-13)",
    ),
    KnownIssue(
        "size_mismatch", "K is not a multiple of 256, and the reference cannot be computed", "error", "image",
        regex=r"The size of tensor a \((?P<a>\d+)\) must match the size of tensor b \((?P<b>\d+)\)",
        why=(
            "This image pads the scales of K={a} to {b}. Images before v0.1.14 also lay them out wrongly, so their "
            "results may be worth nothing."
        ),
        advice="Use a newer image.",
        until="2026-03-18 (v0.1.12), the layout until v0.1.14",
    ),
    KnownIssue(
        "missing_module", "A Python module is missing in the image", "error", "image",
        regex=r"(?:ModuleNotFoundError: No module named |ImportError: cannot import name )'(?P<module>[^']+)'",
        why="{module} is not there, or PYTHONPATH leads to a tree of another date. Gluon exists since v0.1.11.",
        advice="Use another image; a file copied from a newer tree can fail on triton's version.",
    ),
    KnownIssue(
        "jit_failed", "AITER could not compile a module of kernels", "error", "image",
        regex=r"failed jit build \[(?P<module>[^\]]+)\]|build \[(?P<name>[^\]]+)\] under (?P<under>\S+) failed !!!!!!",
        why=(
            "Mostly a missing submodule (3rdparty/composable_kernel), a full disk, or a compiler variable that the "
            "family needs (compiler_env in the inventory)."
        ),
        advice="Read the compiler's output above this line in the log.",
    ),
    KnownIssue(
        "unknown_chip", "AITER cannot tell the chip", "error", "slot",
        regex=(
            r"Get GPU arch from rocminfo failed|No gfx arch found in rocminfo output"
            r"|Unknown GPU architecture: (?P<gfx>\S+)"
        ),
        why="rocminfo names none that AITER knows.",
        advice="Check that the container has /dev/kfd and /dev/dri/renderD*, and that GPU_ARCHS names no other chip.",
    ),
    KnownIssue(
        "wrong_chip", "The family is not for this chip", "unsupported", "setup",
        regex=r"tuning is not supported in this chip (?P<gfx>\S*)|A4W4 GEMM kernel is not supported on",
        why="a4w4_blockscale needs gfx950 (MI350X, MI355X), and this is {gfx}. AITER tunes nothing and exits with 0.",
        advice="Give the run other nodes.",
    ),
    # of the setup and of the machine
    KnownIssue(
        "bad_argument", "AITER's script does not know an option", "error", "setup", exit_codes=(2,),
        regex=(
            r"error: unrecognized arguments: (?P<arguments>.+)|error: argument (?P<argument>[^:\n]+): .+"
            r"|error: the following arguments are required: (?P<missing>.+)|--update_improved requires --compare"
        ),
        why="Options differ between versions: --sort is a flag up to 2026-01-26 and takes True or False since.",
        advice="Check --tuner-arg against this version (the probe lists its options).",
    ),
    KnownIssue(
        "no_device", "No GPU can be used", "error", "slot",
        regex=(
            r"No HIP GPUs are available|no ROCm-capable device is detected|hipErrorNoDevice|invalid device ordinal"
            r"|hipErrorInvalidDevice|Torch not compiled with CUDA enabled|Found no NVIDIA driver"
            r"|Unable to open /dev/kfd|ROCk module is NOT loaded"
        ),
        why="The container sees no GPU, or torch is built without ROCm.",
        advice=(
            "Pass /dev/kfd and the slot's /dev/dri/renderD*, put the user in the groups video and render, run "
            "`rocminfo` on the node."
        ),
    ),
    KnownIssue(
        "jit_lock", "AITER waits for a lock of its compiler", "hang", "setup",
        regex=r"waiting for baton release at (?P<lock>\S+)(?![\s\S]*(?:import \[|finish build \[))",
        why=(
            "The owner of {lock} was killed while compiling. AITER notices since 2026-07-09, but never with --network "
            "host."
        ),
        advice="If nothing compiles there, remove the file.",
        until="2026-07-09; with --network host still open",
    ),
    KnownIssue(
        "duplicate_rows", "Two tuned tables have a row for the same shape", "error", "setup",
        regex=r"Found (?P<count>\d+) duplicate shape entries during merge of '(?P<table>[^']+)'",
        why="AITER refuses duplicates since 2026-04-01, and rewrites the tables while reporting them.",
        advice="Replace the old table by the merged one; `gemmfleet db export` warns of duplicates.",
    ),
    KnownIssue(
        "empty_shape", "A shape without candidates ended AITER's batch", "error", "image",
        regex=(
            r"shape_grouped: group count \((?P<groups>\d+)\) != in_datas count"
            r"|error in batch \d+ of \d+.*list index out of range"
        ),
        why="The family has no kernel for this shape on this chip, or --libtype leaves none.",
    ),
    KnownIssue(
        "disk_full", "The disk is full", "disk_full", "slot",
        regex=r"No space left on device|Disk quota exceeded",
        why="Results or builds do not fit on it.",
        advice="Make room (`gemmfleet runs prune` removes old runs there), or give the node another folder.",
    ),
    KnownIssue(
        "no_permission", "A folder cannot be written", "error", "setup",
        regex=r"PermissionError: \[Errno 13\][^\n]*?'(?P<path>[^'\n]+)'|Read-only file system",
        why="{path} is not writable for the container's user.",
        advice="Check docker.user and the mounts of the inventory.",
    ),
    KnownIssue(
        "shell_quoting", "A shell misread a pasted command line", "error", "setup",
        regex=r"Ambiguous output redirect|Illegal variable name",
        why="A script of your own went through ssh to a node whose login shell is csh.",
        advice="Send the script as a file and run that.",
    ),
    # of results and of the end of a batch
    KnownIssue(
        "batch_error", "An exception ended AITER's batches", "error", "nobody", rank="consequence",
        regex=r"error in batch (?P<batch>\d+) of (?P<total>\d+)(?: after \d+ completed batches)?: (?P<what>.*)",
        why="AITER stops at the first exception: {what}.",
        advice="The node's log has the traceback.",
    ),
    KnownIssue(
        "wrong_results", "No candidate gave a right result", "no_candidate", "shape", rank="consequence",
        regex=r"no valid candidate found for (?P<key>.+?), please check|No kernel can be used for (?P<info>.+)",
        why=(
            "Every candidate of {key} failed or exceeded the error limit. Images before v0.1.14 lay out the scales "
            "wrongly if K is not a multiple of 256 (K=29568, say)."
        ),
        advice="For such K use a newer image; else see the shape's rows in profile.csv.",
    ),
    KnownIssue(
        "interrupted", "The tuner was interrupted", "cancelled", "nobody", rank="consequence",
        regex=r"interrupted by user, tuning stopped",
        why="Somebody stopped it.",
        advice="`gemmfleet resume RUN` does the rest.",
    ),
    KnownIssue(
        "topk_fault", "A shape without a kernel makes AITER drop the rest of its batch", "", "image", rank="remark",
        regex=r"^choose 0 kernels",
        why="AITER reports later shapes as failed though it measured them.",
        until="2026-04-15 (since 2025-09-08)",
    ),
    KnownIssue(
        "unsupported_gemm", "A kernel does not take this shape", "no_candidate", "nobody", rank="remark",
        regex=(
            r"This GEMM is not supported!|out of resource: shared memory"
            r"|wrong! device_gemm with the specified compilation parameters does not support"
        ),
        why="CK has no kernel for it, or Triton's tiles need more shared memory than the chip has. No error.",
    ),
    KnownIssue(
        "zero_time", "A candidate's time is 0", "", "nobody", rank="remark",
        regex=r"but still get 0!|!!!! us = 0",
        why="The profiler saw no kernel.",
        advice="If all candidates are 0, roctracer does not work in the container.",
    ),
)
# fmt: on

ISSUES: tuple[KnownIssue, ...] = tuple(sorted(_ENTRIES, key=lambda issue: get_args(Rank).index(issue.rank)))
"""All known issues, the one that explains most first."""

MAX_TEXT = 1_000_000
MAX_LINE = 4000


def ends_process(line: str) -> KnownIssue | None:
    """The known issue in the line after which a tuner's process cannot go on, or None."""
    plain = clean(line, MAX_LINE)
    for issue in ISSUES:
        if issue.isolates and issue.search(plain):
            return issue
    return None


def diagnose(text: str, returncode: int | None) -> Diagnosis | None:
    """The known issue that best explains a tuner's end, or None.

    `text`: the end of its output, both streams. `returncode`: as in subprocess (-N for a signal), None if gemmfleet
    ended it. Text wins over the exit code, unless the host killed the process.
    """
    plain = "\n".join(clean(line, MAX_LINE) for line in text[-MAX_TEXT:].splitlines())
    by_exit = _issue_of_exit(returncode)
    remark: Diagnosis | None = None
    for issue in ISSUES:  # causes come first, then consequences, then remarks
        match = issue.search(plain)
        if match is None:
            continue
        groups = {name: value for name, value in match.groupdict().items() if value}
        diagnosis = Diagnosis(issue, _line_at(plain, match), groups)
        if issue.rank == "remark":
            remark = remark or diagnosis
        elif by_exit is None or issue.rank == "cause":
            return diagnosis
        else:
            return Diagnosis(by_exit)
    return Diagnosis(by_exit) if by_exit is not None else remark


def _issue_of_exit(returncode: int | None) -> KnownIssue | None:
    for issue in ISSUES:
        if returncode is not None and returncode in issue.exit_codes:
            return issue
    return None


def _line_at(text: str, match: re.Match[str]) -> str:
    """The whole lines that a match lies in."""
    start = text.rfind("\n", 0, match.start()) + 1
    end = text.find("\n", match.end())
    return clean(text[start : end if end >= 0 else len(text)], 400)
