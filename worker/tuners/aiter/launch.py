"""Makes the command line of an AITER process. It only has flags that the script has."""

from __future__ import annotations

from pathlib import Path

from worker.families import Family
from worker.tuners.aiter.script import TunerScript
from worker.tuners.aiter.spec import Options, tuner_arg_flags

UNTUNED, TUNED, PROFILE, LOG = "untuned.csv", "tuned.csv", "profile.csv", "tuner.log"
"""Files in the folder of a process: what AITER reads and writes, and what it prints."""
JOURNAL, BLOCKED = "candidates.jsonl", "blocked.jsonl"
"""Files of the shim in that folder: its records, and the blocked candidates (shim/sitecustomize.py)."""
DEFAULT_BATCH = 4
"""Shapes a batch if the version loses nothing by it: a pool of processes starts for each, 10 to 25 s."""
LONGEST_TIMEOUT_S = 7 * 24 * 3600


def batch_size(family: Family, script: TunerScript, options: Options) -> int:
    """Shapes that AITER takes at once.

    A shape without a valid candidate spoils the later shapes of its batch before `daa8e94a49` (2026-04-15), the day
    after `--run_config` came. We take winners from the profile there, and still give such a version one shape a batch.
    """
    several = family.aiter.always_has_candidates and script.has("--run_config")
    return options.batch or (DEFAULT_BATCH if several else 1)


def ignored_options(script: TunerScript, options: Options) -> list[str]:
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
    family: Family, script: TunerScript, options: Options, folder: Path, *, batch: int, err_ratio: float
) -> list[str]:
    """The arguments after the interpreter. Raises ValueError if the script lacks a flag that nothing replaces.

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


def aiter_timeout(options: Options, batch: int) -> int:
    """AITER's own limit of a task in seconds. It is beyond ours, because a shape that AITER gives up is lost silently
    with all candidates. Until 2026-08 it counts from the start of the batch."""
    return int(options.tuner_timeout * 1.5 + 60) * batch if options.tuner_timeout else LONGEST_TIMEOUT_S
