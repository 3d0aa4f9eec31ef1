"""Registry entry of the tuner `aiter`, AITER's own tuner scripts, and its options in a spec and of a node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from worker.registry import boolean, option, parse_options, seconds, text, whole
from worker.tuners.catalog import Flag, TunerSpec

LARGEST_BYTES = 64 << 30
"""Operands, output and float32 references above this may not fit beside AITER's copies of them."""


OURS = frozenset((
    "-i", "--untune_file", "--input_file", "-o", "--tune_file", "--tuned_file", "-o2", "--profile_file",
    "--mp", "--all", "--sort", "--batch", "--errRatio", "--timeout", "--warmup", "--iters", "-k", "--splitK",
    "-v", "--verbose", "--run_config", "--compare", "--update_improved", "--min_improvement_pct", "--model_dir",
    "--preshuffle", "--apply", "--batch_g", "--M", "--N", "--K",
))  # fmt: skip
"""Flags that gemmfleet sets, or must not be set."""
REFUSED = {
    "--grouped-gemm": "it tunes AITER's tuned_grouped_fmoe.csv, whose rows have other columns, are for gfx1250 and name"
    " no error: run AITER's script itself",
    "--mxfp4-flydsl": "it measures pairs of kernels in the script's own process, where one that faults cannot be told"
    " from the others, and writes no profile: run AITER's script itself",
}
"""Flags with which a script tunes something else, or cannot be watched, with the reason."""


def _words(value: Any) -> tuple[str, ...]:
    """Rule: a word, or a list of words."""
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, (list, tuple)) or not all(isinstance(word, str) and word for word in words):
        raise ValueError("no list of words")
    return tuple(words)


_COUNT = whole(0, 1_000_000)


@dataclass(frozen=True, slots=True)
class AiterOptions:
    """Each option with its default. 0 or empty: AITER's own, or what its version needs."""

    family: str = option("", text)
    """Known before the first group, so that modules are built before anything is claimed."""
    root: str = option("", text)
    """AITER's tree or package, where it is not found by itself."""
    warmup: int = option(0, _COUNT)
    iters: int = option(0, _COUNT)
    batch: int = option(0, _COUNT)
    """Shapes that AITER takes at once."""
    tuner_timeout: float = option(0.0, seconds(0, 1e6))
    """Seconds that a shape may take; 0: as long as there is progress."""
    split_k: bool = option(False, boolean)
    tuner_args: tuple[str, ...] = option((), _words)
    """Further arguments for the script, each flag checked against those it has."""

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> AiterOptions:
        """Raises ValueError with every fault: unknown option, wrong type, value out of range."""
        return parse_options(cls, "aiter", raw)


def tuner_arg_flags(words: tuple[str, ...]) -> list[tuple[str, list[str]]]:
    """The words of --tuner-arg by flag: ("--libtype", ["--libtype", "ck"]).

    Raises ValueError if a flag is ours to set or tunes something else, or if a value comes without a flag.
    """
    flags: list[tuple[str, list[str]]] = []
    for word in words:
        name, sep, value = word.partition("=")
        is_number = name.lstrip("-").replace(".", "").isdigit()
        if name.startswith("-") and not is_number:
            _check_flag(name, word)
            flags.append((name, [name, value] if sep else [name]))
        elif flags:
            flags[-1][1].append(word)
        else:
            raise ValueError(f"--tuner-arg {word}: a flag such as --libtype must come first")
    return flags


def _check_flag(name: str, word: str) -> None:
    if name in OURS:
        raise ValueError(f"--tuner-arg {word}: {name} is gemmfleet's to set")
    if name in REFUSED:
        raise ValueError(f"--tuner-arg {word}: {REFUSED[name]}")
    if not name.startswith("--"):
        raise ValueError(f"--tuner-arg {word}: write the long name of the flag")


def _parse(options: Mapping[str, Any]) -> object:
    parsed = AiterOptions.parse(options)
    tuner_arg_flags(parsed.tuner_args)  # raises where no script can take them
    return parsed


def risk(family: str, key: Mapping[str, int | str]) -> str:
    """The reason that a kernel of AITER may fault on a shape (`Family.risks`); "" if none is known.

    Such shapes are tuned all the same, but in groups of their own, so that a fault takes little along.
    """
    from worker.families import FAMILIES  # here, as below: a command's help reads the specs, and no family

    risks = FAMILIES[family].risks
    if not risks:
        return ""
    reasons = [r.of(key) for r in risks]
    m, n, k = (int(key[c]) for c in ("M", "N", "K"))
    if 4 * int(key.get("B", 1)) * (m * k + n * k + m * n) > LARGEST_BYTES:
        reasons.append("its references take more than 64 GiB")
    return ", ".join(filter(None, reasons))


def _err_ratio(family: str) -> float:
    from worker.families import FAMILIES

    return FAMILIES[family].aiter.err_ratio


def tree_version(name: str, device: Mapping[str, Any]) -> str:
    """Commit or version of the tree that a slot used, "" for unknown."""
    tree = device.get("aiter")
    if not isinstance(tree, dict):
        return ""
    return str(tree.get("commit") or tree.get("version") or "")[:40]


SPEC = TunerSpec(
    name="aiter",
    tuner_class="worker.tuners.aiter.tuner:AiterTuner",
    software="aiter",
    parse_options=_parse,
    start_limits=(7200.0, 900.0),  # the first start builds AITER's modules, for minutes
    keeps_cache=True,
    keeps_reproductions=True,
    wants_family=True,
    err_ratio=_err_ratio,
    flags=(
        Flag("warmup", "--warmup", int, "Warm-up runs of a candidate.", minimum=1),
        Flag("iters", "--iters", int, "Timed runs of a candidate.", minimum=1),
        Flag("tuner_timeout", "--tuner-timeout", float, "Seconds that a shape may take.", minimum=1.0),
        Flag("batch", "--batch", int, "Shapes in one call of AITER's script.", minimum=1),
        Flag("split_k", "--split-k", bool, "Try split-K kernels as well."),
        Flag("tuner_args", "--tuner-arg", list, "Argument for AITER's script, repeatable.", metavar="WORD"),
    ),
    produces="aiter",
    risk=risk,
    version=tree_version,
)
