"""The command line of one process of AITER, made of the flags that the script has, and of no others.

The options that the user asked for and that the script does not have are named in notes. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from worker.families import Family
from worker.tuners.aiter.findings import TunerScript
from worker.tuners.aiter.spec import Options, tuner_arg_flags

DEFAULT_BATCH = 4
"""Shapes a batch where the version loses nothing by it: a pool of processes starts for each, 10 to 25 s."""
LONGEST_TIMEOUT_S = 7 * 24 * 3600


@dataclass(frozen=True, slots=True)
class Strategy:
    """Way in which this version gets a group. `batch`: shapes in a batch. `notes`: for the log."""

    batch: int
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ProcessFiles:
    """Files that one process reads and writes."""

    folder: Path

    @property
    def untuned(self) -> Path:
        return self.folder / "untuned.csv"

    @property
    def tuned(self) -> Path:
        return self.folder / "tuned.csv"

    @property
    def profile(self) -> Path:
        return self.folder / "profile.csv"

    @property
    def log(self) -> Path:
        return self.folder / "tuner.log"

    @property
    def journal(self) -> Path:
        return self.folder / "candidates.jsonl"

    @property
    def blocked(self) -> Path:
        return self.folder / "blocked.jsonl"


def strategy(family: Family, script: TunerScript, options: Options) -> Strategy:
    """The strategy that the version needs, with notes on the options that it does not have.

    A shape without a valid candidate spoils the later shapes of its batch before `daa8e94a49` (2026-04-15), the day
    after `--run_config` came. We take winners from the profile there, and still give such a version one shape a batch.
    """
    asked = (
        ("--warmup", options.warmup, "--warmup"), ("--iters", options.iters, "--iters"),
        ("--batch", options.batch, "--batch"), ("--split-k", options.split_k, "--splitK"),
        ("--tuner-timeout", options.tuner_timeout, "--timeout"),
        *((f"--tuner-arg {name}", True, name) for name, _ in tuner_arg_flags(options.tuner_args)),
    )  # fmt: skip
    here = f"{script.path.name} of this image has no"
    missing = [(name, flag) for name, value, flag in asked if value and not script.has(flag)]
    notes = [f"{name} is ignored: {here} {flag}" for name, flag in missing if name != "--tuner-timeout"]
    if ("--tuner-timeout", "--timeout") in missing:
        notes.append(f"--tuner-timeout is kept by gemmfleet alone: {here} --timeout")
    several = family.aiter.always_has_candidates and script.has("--run_config")
    return Strategy(options.batch or (DEFAULT_BATCH if several else 1), tuple(notes))


def argv(
    family: Family,
    script: TunerScript,
    options: Options,
    files: ProcessFiles,
    *,
    batch: int,
    err_ratio: float,
) -> list[str]:
    """The arguments after the interpreter. Raises ValueError where the script lacks a flag that nothing replaces.

    Never `--verbose`: since 2026-05-26 (9a41912018) AITER's comparison raises with it instead of returning the error,
    and a wrong candidate reads as one that cannot run.
    """
    out = [str(script.path)]
    # always both: with --preshuffle the defaults are those of the family without it
    for names, path in (
        (("--untune_file", "--input_file"), files.untuned),
        (("--tune_file", "--tuned_file"), files.tuned),
    ):
        known = [n for n in names if script.has(n)]
        if not known:
            raise ValueError(f"{script.path.name} of this image has none of {' and '.join(names)}")
        out += [known[0], str(path)]
    for flag in family.aiter.flags:
        if script.has(flag):
            out.append(flag)
    if script.has("--profile_file"):
        out += ["--profile_file", str(files.profile)]
    if script.has("--mp"):
        out += ["--mp", "1"]
    if script.has("--errRatio"):
        out += ["--errRatio", f"{err_ratio:g}"]
    if script.has("--batch"):
        out += ["--batch", str(batch)]
    if script.has("--timeout"):
        out += ["--timeout", str(aiter_timeout(options, batch))]
    for flag, value in (("--warmup", options.warmup), ("--iters", options.iters)):
        if value and script.has(flag):
            out += [flag, str(value)]
    if options.split_k and script.has("--splitK"):
        out.append("--splitK")
    return out + _further(script, options.tuner_args)


def aiter_timeout(options: Options, batch: int) -> int:
    """AITER's own limit of a task in seconds. It is beyond ours, because a shape that AITER gives up is lost silently
    with all candidates. Until 2026-08 it counts from the start of the batch."""
    return int(options.tuner_timeout * 1.5 + 60) * batch if options.tuner_timeout else LONGEST_TIMEOUT_S


def _further(script: TunerScript, words: tuple[str, ...]) -> list[str]:
    return [w for name, mine in tuner_arg_flags(words) if script.has(name) for w in mine]
