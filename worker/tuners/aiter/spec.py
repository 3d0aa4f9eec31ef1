"""Registry entry of the tuner `aiter`: AITER's own tuner scripts, driven in the image that the worker runs in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from worker.families import FAMILIES
from worker.tuners.catalog import CostGuess, Flag, TunerSpec

if TYPE_CHECKING:
    from worker.tuners.base import Tuner

LARGEST_BYTES = 64 << 30
"""Operands, output and float32 references above this may not fit beside AITER's copies of them."""


def create() -> Tuner:
    """A tuner that has not been opened."""
    from worker.tuners.aiter.tuner import AiterTuner

    return AiterTuner()


def _parse(options: Mapping[str, Any]) -> object:
    from worker.tuners.aiter.drive.command import check_words
    from worker.tuners.aiter.options import Options

    parsed = Options.parse(options)
    check_words(parsed.tuner_args)
    return parsed


def risk(family: str, key: Mapping[str, int | str]) -> str:
    """Class of shapes on which a kernel of AITER may fault (`Family.risks`), in words; "" for none. No verdict: it
    keeps what a fault would take along small."""
    risks = FAMILIES[family].risks
    if not risks:
        return ""
    found = [words for r in risks if (words := r.of(key))]
    m, n, k = (int(key[c]) for c in ("M", "N", "K"))
    if 4 * int(key.get("B", 1)) * (m * k + n * k + m * n) > LARGEST_BYTES:
        found.append("its references take more than 64 GiB")
    return ", ".join(found)


def _version(name: str, device: Mapping[str, Any]) -> str:
    tree = device.get("aiter")
    found = tree if isinstance(tree, dict) else {}
    return str(found.get("commit") or found.get("version") or "")[:40]


SPEC = TunerSpec(
    name="aiter",
    create=create,
    parse_options=_parse,
    # 53 candidates and about 12 s a shape, a pool of processes 10 to 25 s a group (AITER's own practice on MI300 and
    # MI355X), modules that are built at the start
    cost_guess=CostGuess(15.0, 12.0, 3e-12, 3e-8, 40.0),
    start_limits=(7200.0, 900.0),  # the first start builds for minutes
    keeps_cache=True,
    keeps_reproductions=True,
    wants_family=True,
    err_ratio={f.name: f.aiter.err_ratio for f in FAMILIES.values()},
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
    version=_version,
)
