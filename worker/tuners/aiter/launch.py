"""Makes the command line of an AITER process, and names the files in its folder.

`argv` only sets flags that the script of this image has (script.py reads them); session.py calls it for each process.
"""

from __future__ import annotations

from pathlib import Path

from worker.families import Family
from worker.tuners.aiter.script import TunerScript
from worker.tuners.aiter.spec import AiterOptions, tuner_arg_flags

UNTUNED = "untuned.csv"
"""AITER's input, in the folder of a process as all of these: the key columns of the shapes."""
TUNED = "tuned.csv"
"""AITER's output: the winners."""
PROFILE = "profile.csv"
"""AITER's output: all candidates."""
LOG = "tuner.log"
"""All that AITER prints."""
JOURNAL = "candidates.jsonl"
"""The shim's records of candidates (journal.py)."""
BLOCKED = "blocked.jsonl"
"""The shim's input: the candidates that are not measured (choice.py)."""
DEFAULT_BATCH = 4
"""Shapes a batch if the version loses nothing by it: a pool of processes starts for each, 10 to 25 s."""
LONGEST_TIMEOUT_S = 7 * 24 * 3600
"""--timeout if the user sets no limit. Without the flag, AITER stops a task after 1800 s since 2026-08-08."""


def batch_size(family: Family, script: TunerScript, options: AiterOptions) -> int:
    """Shapes that AITER takes at once.

    A shape without a valid candidate spoils the later shapes of its batch before `daa8e94a49` (2026-04-15), the day
    after `--run_config` came. We take winners from the profile there, and still give such a version one shape a batch.
    """
    if options.batch:
        return options.batch
    keeps_later_shapes = family.aiter.always_has_candidates and script.has("--run_config")
    return DEFAULT_BATCH if keeps_later_shapes else 1


def ignored_options(script: TunerScript, options: AiterOptions) -> list[str]:
    """Notes on the options that the user asked for and that this version of the script does not have."""
    asked = {
        "--warmup": (options.warmup, "--warmup"),
        "--iters": (options.iters, "--iters"),
        "--batch": (options.batch, "--batch"),
        "--split-k": (options.split_k, "--splitK"),
    }
    for flag, _ in tuner_arg_flags(options.tuner_args):
        asked[f"--tuner-arg {flag}"] = (True, flag)
    here = f"{script.path.name} of this image has no"
    notes = []
    for name, (value, flag) in asked.items():
        if value and not script.has(flag):
            notes.append(f"{name} is ignored: {here} {flag}")
    if options.tuner_timeout and not script.has("--timeout"):
        notes.append(f"--tuner-timeout is kept by gemmfleet alone: {here} --timeout")
    return notes


def argv(
    family: Family, script: TunerScript, options: AiterOptions, folder: Path, *, batch: int, err_ratio: float
) -> list[str]:
    """The arguments after the interpreter. Raises ValueError if the script lacks a flag that nothing replaces.

    Always --mp 1, because the slot has one GPU. Then AITER measures all candidates of a shape in one process of its
    pool, and a kernel that faults takes those of its shape along.

    Never `--verbose`: since 2026-05-26 (9a41912018) AITER's comparison raises with it instead of returning the error,
    and a wrong candidate reads as one that cannot run.
    """
    # always both files: with --preshuffle the defaults are those of the family without it
    words = [str(script.path)]
    words += [_file_flag(script, "--untune_file", "--input_file"), str(folder / UNTUNED)]
    words += [_file_flag(script, "--tune_file", "--tuned_file"), str(folder / TUNED)]
    words += [flag for flag in family.aiter.flags if script.has(flag)]
    values = {
        "--profile_file": folder / PROFILE,
        "--mp": 1,
        "--errRatio": f"{err_ratio:g}",
        "--batch": batch,
        "--timeout": aiter_timeout(options, batch),
        "--warmup": options.warmup,
        "--iters": options.iters,
    }
    for flag, value in values.items():
        if value and script.has(flag):
            words += [flag, str(value)]
    if options.split_k and script.has("--splitK"):
        words.append("--splitK")
    for flag, flag_words in tuner_arg_flags(options.tuner_args):
        if script.has(flag):
            words += flag_words
    return words


def _file_flag(script: TunerScript, *names: str) -> str:
    """The name that this script has for the flag of a file. Raises ValueError."""
    for name in names:
        if script.has(name):
            return name
    raise ValueError(f"{script.path.name} of this image has none of {' and '.join(names)}")


def aiter_timeout(options: AiterOptions, batch: int) -> int:
    """AITER's own limit of a task in seconds. It is beyond ours, because a shape that AITER gives up is lost silently
    with all candidates. Until 2026-08 it counts from the start of the batch."""
    if not options.tuner_timeout:
        return LONGEST_TIMEOUT_S
    return int(options.tuner_timeout * 1.5 + 60) * batch
