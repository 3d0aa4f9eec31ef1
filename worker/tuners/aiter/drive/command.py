"""The command line of one process of AITER, made of the flags that the script has, and of no others.

What a version needs follows from facts that were read from its files: how many shapes a batch may hold, whether a
process may hold more than one, what it ignores. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from worker.families import Family
from worker.tuners.aiter.inspect.findings import FamilyFindings
from worker.tuners.aiter.spec import Options, tuner_arg_flags

DEFAULT_BATCH = 4
"""Shapes a batch where the version loses nothing by it: a pool of processes starts for each, 10 to 25 s."""
LONGEST_TIMEOUT_S = 7 * 24 * 3600


@dataclass(frozen=True, slots=True)
class Strategy:
    """Way in which this version gets a group. `batch` 0: there is no such flag. `notes`: for log and provenance."""

    batch: int
    one_process_a_shape: bool
    ignored: tuple[str, ...]
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


def strategy(family: Family, script: FamilyFindings, options: Options) -> Strategy:
    """The strategy that the version needs, and the options that it ignores."""
    ignored: list[str] = []
    notes: list[str] = []
    for name, value, flag in _requested(options):
        if not value:
            continue
        if not script.has(flag):
            ignored.append(name)
            notes.append(f"{name} is ignored: {script.path.name} of this image has no {flag}")
        elif flag in script.ignored:
            ignored.append(name)
            notes.append(f"{name} is ignored: {script.path.name} of this image offers {flag} and does nothing with it")
    alone = not script.has("--batch") or script.profile_keeps_last_batch
    if alone:
        why = "keeps the profile of the last batch only" if script.has("--batch") else "writes at the end only"
        notes.append(f"one process a shape: {script.path.name} of this image {why}")
        if options.batch and "--batch" not in ignored:
            ignored.append("--batch")
            notes.append("--batch is ignored: there is one process a shape")
        batch = 1 if script.has("--batch") else 0
    elif options.batch:
        batch = options.batch
        if script.topk_fault and batch > 1:
            notes.append("a shape without a kernel spoils the rest of its batch here: winners are made of the profile")
    elif script.topk_fault or script.timeout_from_submission:
        batch = 1
        notes.append("one shape a batch: a shape without a kernel, or a slow one, would spoil the others of its batch")
    else:
        batch = DEFAULT_BATCH if family.aiter.always_has_candidates else 1
    if options.tuner_timeout and not script.has("--timeout"):
        notes.append(f"--tuner-timeout is kept by gemmfleet alone: {script.path.name} of this image has no --timeout")
    for word in _unknown(script, options.tuner_args):
        ignored.append(f"--tuner-arg {word}")
        notes.append(f"--tuner-arg {word} is ignored: {script.path.name} of this image has no such flag")
    return Strategy(batch, alone, tuple(ignored), tuple(notes))


def argv(
    family: Family,
    script: FamilyFindings,
    options: Options,
    files: ProcessFiles,
    *,
    batch: int,
    err_ratio: float,
    watched: bool = False,
) -> list[str]:
    """The arguments after the interpreter. Raises ValueError where the script lacks a flag that nothing replaces.

    `watched`: the shim reports each candidate. Then `--verbose` is left out: since 2026-05-26 (9a41912018) AITER's
    comparison raises with it instead of returning the error, and a wrong candidate reads as one that cannot run.
    Without the shim its `[Done]` lines are the only signs of progress.
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
    if script.has("--batch") and batch:
        out += ["--batch", str(batch)]
    if script.has("--verbose") and not watched:
        out.append("--verbose")
    if script.has("--timeout"):
        out += ["--timeout", str(aiter_timeout(options))]
    for flag, value in (("--warmup", options.warmup), ("--iters", options.iters)):
        if value and script.has(flag):
            out += [flag, str(value)]
    if options.split_k and script.has("--splitK"):
        out.append("--splitK")
    return out + _further(script, options.tuner_args)


def aiter_timeout(options: Options) -> int:
    """AITER's own limit of a task: beyond ours, for what it gives up it gives up silently with all candidates."""
    return int(options.tuner_timeout * 1.5 + 60) if options.tuner_timeout else LONGEST_TIMEOUT_S


def _requested(options: Options) -> tuple[tuple[str, object, str], ...]:
    return (
        ("--warmup", options.warmup, "--warmup"),
        ("--iters", options.iters, "--iters"),
        ("--batch", options.batch, "--batch"),
        ("--split-k", options.split_k, "--splitK"),
    )


def _unknown(script: FamilyFindings, words: tuple[str, ...]) -> list[str]:
    return [name for name, _ in tuner_arg_flags(words) if not script.has(name)]


def _further(script: FamilyFindings, words: tuple[str, ...]) -> list[str]:
    return [w for name, mine in tuner_arg_flags(words) if script.has(name) for w in mine]
