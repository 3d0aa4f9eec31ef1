"""Registry entry and options of the tuner `aiter-triton`: configs of AITER's own Triton GEMMs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worker.families import FAMILIES
from worker.registry import option, parse_options, text
from worker.triton_configs.kinds import BY_FAMILY, BY_NAME, STANDARD_BOUNDS, ConfigKind
from worker.triton_configs.resolve import is_bucket
from worker.tuners.aiter.spec import risk, tree_version
from worker.tuners.catalog import AGAIN, Flag, TunerSpec
from worker.tuners.common.problem import NotImportableError as NotImportableError  # what the check catches
from worker.tuners.search.source import SearchOptions, cost_factor, mapping_of

if TYPE_CHECKING:
    from worker.tuners.base import Tuner

NAME = "aiter-triton"


_BUCKETS = mapping_of(
    lambda k, v: is_bucket(k) and isinstance(v, Mapping) and bool(v), "configs by bucket (M_LEQ_x, M_GEQ_x, any)"
)


@dataclass(frozen=True, slots=True)
class Options(SearchOptions):
    """The options of the search and a few more; docs/reference/tuners.md explains them."""

    kind: str = option("", text)  # kind of config (worker/triton_configs/kinds.py), where it is not the family's own
    # Buckets meant for the default file: nothing is searched, they and today's configs are measured.
    default: tuple[tuple[str, Mapping[str, Any]], ...] = option((), _BUCKETS)

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Options:
        """Raises ValueError with every fault."""
        made = parse_options(cls, NAME, raw)
        if made.kind and made.kind not in tuned_kinds():
            raise ValueError(f"{made.kind!r} is not a kind that can be tuned (there are {', '.join(tuned_kinds())})")
        return made


def tuned_kinds() -> tuple[str, ...]:
    """Names of the kinds that this tuner has inputs for."""
    from worker.tuners.aiter_triton.space import family_of  # here: a command's help reads the specs

    return tuple(k.name for k in BY_NAME.values() if family_of(k))


def kind_of(options: Options) -> ConfigKind:
    """The kind of a run. Raises ValueError where the family has none."""
    if options.kind:
        return BY_NAME[options.kind]
    if options.family not in BY_FAMILY:
        known = ", ".join(_families({}))
        raise ValueError(f"AITER has no Triton GEMM with config files for {options.family} (but {known})")
    return BY_FAMILY[options.family]


def source_of(folder: Path, kind: str) -> str:
    """A hash of a kind's name and of the sources of AITER's Triton GEMMs in `aiter/ops/triton`."""
    digest = hashlib.sha256(kind.encode())
    for path in sorted((*folder.glob("gemm/**/*.py"), *folder.glob("_triton_kernels/**/*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def create() -> Tuner:
    """A tuner that has not been opened."""
    from worker.tuners.aiter_triton.tuner import AiterTritonTuner

    return AiterTritonTuner()


def _families(options: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(name for name in FAMILIES if options.get("kind") or name in BY_FAMILY)


SPEC = TunerSpec(
    name=NAME,
    create=create,
    software="aiter",
    parse_options=Options.parse,
    families=_families,
    slower_families={"a4w4_blockscale": 2.0},
    cost_factor=cost_factor,
    wants_family=True,
    wants_counts=True,
    flags=(
        Flag("search", "--search", str, "Search: fast (the default) or exhaustive.", metavar="HOW"),
        Flag("budget_s_per_shape", "--budget", float, "Seconds that a shape may take.", metavar="SECONDS"),
        AGAIN,
    ),
    produces="configs",
    risk=risk,
    # the bucket of an M: all M of a bucket get one config
    unit=lambda family, key: next((x for x in STANDARD_BOUNDS if int(key["M"]) <= x), 0),
    mixes=True,
    version=lambda name, device: f"{tree_version(name, device)} triton {device.get('triton') or ''}".strip(),
)
