"""Known faults of how a tuner was set up, and of the machine around it."""

from __future__ import annotations

from worker.tuners.aiter.known_issues.faults import A4, BASE, MP
from worker.tuners.aiter.known_issues.images import CORE
from worker.tuners.aiter.known_issues.pattern import Pattern, Source

BATON = "aiter/jit/utils/file_baton.py"

SETUP: tuple[Pattern, ...] = (
    Pattern(
        "bad_argument",
        "AITER's script does not know an option",
        r"error: unrecognized arguments: (?P<arguments>.+)|error: argument (?P<argument>[^:\n]+): .+"
        r"|error: the following arguments are required: (?P<missing>.+)|--update_improved requires --compare",
        "error",
        "setup",
        "Options are those that the script has; a word given with --tuner-arg that it does not have is left "
        "out, and said.",
        "The script refused its command line. Check --tuner-arg against this version (the probe lists its options): "
        "--sort is a flag up to 2026-01-26 and takes True or False after it.",
        "gemm_a4w4_blockscale_tune.py: error: unrecognized arguments: True",
        (
            Source(A4, '"--sort"', "v0.1.5", "v0.1.5", "code"),
            Source(BASE, '"--sort"', "v0.1.7.post5", "newest", "code"),
            Source(BASE, "--update_improved requires --compare", "v0.1.13"),
        ),
        exits=(2,),
        origin="argparse",
    ),
    Pattern(
        "no_device",
        "No GPU can be used",
        r"No HIP GPUs are available|no ROCm-capable device is detected|hipErrorNoDevice|invalid device ordinal"
        r"|hipErrorInvalidDevice|Torch not compiled with CUDA enabled|Found no NVIDIA driver"
        r"|Unable to open /dev/kfd|ROCk module is NOT loaded",
        "error",
        "slot",
        "The slot fails its canary and gets no work; a new canary runs after a cool-down.",
        "The container sees no GPU. Pass /dev/kfd and the slot's /dev/dri/renderD*, put the user in the groups "
        "video and "
        "render, and check `rocminfo` on the node. A torch without ROCm in the image has the same effect.",
        "RuntimeError: No HIP GPUs are available",
        (Source(MP, "torch.cuda.device_count()", kind="code"),),
        origin="torch and ROCm",
    ),
    Pattern(
        "jit_lock",
        "AITER waits for a lock of its compiler",
        r"waiting for baton release at (?P<lock>\S+)(?![\s\S]*(?:import \[|finish build \[))",
        "hang",
        "setup",
        "Every slot has a JIT folder, hostname and TMPDIR of its own, so the only owner can be a process that was "
        "killed while it compiled: a lock whose owner is dead is removed before the start.",
        "{lock} is held. Before 2026-07-09 AITER never notices that the owner is dead, and with --network host "
        "it cannot "
        "tell later either. If nothing compiles there, remove the file.",
        "[aiter] waiting for baton release at /root/.aiter/jit/build/lock_module_gemm_a4w4_blockscale_tune",
        (
            Source(BATON, "waiting for baton release at {}"),
        ),
    ),
    Pattern(
        "jit_lock_broken",
        "AITER removed a lock whose owner was dead",
        r"broke stale lock at (?P<lock>\S+)",
        "",
        "nobody",
        "Nothing.",
        "A process was killed while it compiled; AITER noticed and compiles again.",
        "[aiter] [pid=71] broke stale lock at /jit/build/lock_module_x (dead/abandoned holder)",
        (Source(BATON, "[pid={}] broke stale lock at {} (dead/abandoned holder)", "v0.1.20"),),
    ),
    Pattern(
        "duplicate_rows",
        "Two tuned tables that AITER merges have a row for the same shape",
        r"Found (?P<count>\d+) duplicate shape entries during merge of '(?P<table>[^']+)'",
        "error",
        "setup",
        "Inherited AITER_CONFIG_* are cleared for tuning, so it is the image's own tables.",
        "Since 2026-04-01 AITER refuses duplicates, and rewrites the tables as it says so. `gemmfleet db "
        "export` warns of "
        "them before; a merged table must replace the old one, not lie beside it.",
        "RuntimeError: Found 4 duplicate shape entries during merge of 'a4w4_blockscale_tuned_gemm'. Auto-resolved by",
        (Source(CORE, "Found {} duplicate shape entries during merge of '{}'. ", "v0.1.12.post1"),),
    ),
    Pattern(
        "missing_input",
        "AITER does not find the list of shapes",
        r"Not exist (?:untuned|\S+_untuned_gemm\.csv) file: (?P<path>\S+)",
        "error",
        "setup",
        "gemmfleet writes the list itself: the folder must have vanished.",
        "{path} is gone: is the node's folder cleaned while runs go on, or is its disk full?",
        "AssertionError: Not exist untuned file: /node/0/in.csv",
        (
            Source(A4, "Not exist a4w4_untuned_gemm.csv file: {}", "v0.1.5", "v0.1.5"),
            Source(BASE, "Not exist untuned file: {}", "v0.1.7.post5"),
        ),
    ),
    Pattern(
        "legacy_table",
        "An older tuned table is read that lacks a column",
        r"KeyError: ['\"](?:\[?'?)gfx|KeyError: .*not in index",
        "error",
        "setup",
        "Every group gets result files of its own, so this cannot come from one of ours.",
        "A table from before 2026-04-17 has no gfx column, and AITER up to 2026-06-30 does not add it. Export "
        "the table "
        "again with `gemmfleet db export`.",
        "KeyError: 'gfx'",
        (Source(BASE, "self.tunedf[untunedf_cols]", "v0.1.7.post5", "newest", "code"),),
        origin="pandas",
    ),
    Pattern(
        "empty_shape",
        "A shape has no candidate at all, and AITER's batch ended with it",
        r"shape_grouped: group count \((?P<groups>\d+)\) != in_datas count|error in batch \d+ of \d+.*list "
        r"index out of "
        r"range",
        "error",
        "image",
        "Families that may have such shapes get one shape a batch, so the others are not lost.",
        "No kernel of the family is for this shape on this chip; with --libtype, perhaps none of those libraries.",
        "AssertionError: shape_grouped: group count (3) != in_datas count (4)",
        (
            Source(MP, "result.append(task_result[0])", "v0.1.9.post1", "newest", "code"),
            Source(MP, "shape_grouped: group count ({}) != in_datas count ({})", "v0.1.13"),
        ),
    ),
    Pattern(
        "disk_full",
        "The disk is full",
        r"No space left on device|Disk quota exceeded",
        "disk_full",
        "slot",
        "The node gets no more work until there is room.",
        "Make room on the node (`gemmfleet runs prune` removes old runs there), or give it another folder.",
        "OSError: [Errno 28] No space left on device: '/node/jit/build'",
        (Source(BASE, "to_csv(", "v0.1.7.post5", "newest", "code"),),
        origin="Linux",
    ),
    Pattern(
        "no_permission",
        "A folder cannot be written",
        r"PermissionError: \[Errno 13\][^\n]*?'(?P<path>[^'\n]+)'|Read-only file system",
        "error",
        "setup",
        "AITER_JIT_DIR, HOME and TMPDIR of a slot lie in the node's folder, so it is the image or the mount.",
        "{path} is not writable for the user of the container. See docker.user and the mounts of the inventory.",
        "PermissionError: [Errno 13] Permission denied: '/opt/aiter/jit/build'",
        (Source(CORE, "os.makedirs(bd_dir, exist_ok=True)", kind="code"),),
        origin="Python",
    ),
    Pattern(
        "shell_quoting",
        "A command line was pasted into a shell on the way to the node",
        r"Ambiguous output redirect|Illegal variable name",
        "error",
        "setup",
        "Does not happen with gemmfleet: scripts are sent as files and run by path, whatever the login shell.",
        "A script of your own was pasted into ssh, and the node's login shell is csh. Send it as a file and run that.",
        "Illegal variable name.",
        (),
        origin="csh",
        runbook=("SSH escaping", "Docker `$!` escaping"),
    ),
    Pattern(
        "interrupted",
        "The tuner was interrupted",
        r"interrupted by user, tuning stopped",
        "cancelled",
        "nobody",
        "What was measured is kept.",
        "Somebody stopped it. `gemmfleet resume` goes on with what is left.",
        "[aiter] interrupted by user, tuning stopped, 1 batches processed",
        (Source(BASE, "interrupted by user, tuning stopped, {} batches processed", "v0.1.7.post5"),),
    ),
    Pattern(
        "batch_error",
        "An exception ended AITER's batches",
        r"error in batch (?P<batch>\d+) of (?P<total>\d+)(?: after \d+ completed batches)?: (?P<what>.*)",
        "error",
        "nobody",
        "AITER stops at the first exception: the shapes that it did not reach run again.",
        "AITER said: {what}. The traceback is in the node's log.",
        "[aiter] error in batch 2 of 4 after 1 completed batches: unexpected",
        (
            Source(BASE, "error in batch {} of {}: {}", "v0.1.7.post5", "v0.1.12.post1"),
            Source(BASE, "error in batch {} of {} after {} completed batches: {}", "v0.1.13"),
        ),
    ),
    Pattern(
        "not_finished",
        "AITER counts shapes that are not tuned",
        r"\[Tuning not Finished\]",
        "",
        "nobody",
        "Says nothing by itself (exit code 1 since 2026-01-27): rows are compared with the shapes asked for.",
        "Some shapes of the group failed; each has a reason of its own.",
        "[aiter] \x1b[91m[Tuning not Finished]\x1b[0m some shapes are not tuned or all failed",
        (Source(BASE, "[Tuning not Finished]\x1b[0m some shapes are not tuned or all failed", "v0.1.10.post3"),),
    ),
)  # fmt: skip
"""Faults of the setup and the machine, and last what says little by itself."""
