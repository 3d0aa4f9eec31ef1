"""Registry entry and options of the tuner `aiter-triton`: configs of AITER's own Triton GEMMs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.families import FAMILIES
from worker.registry import option, parse_options, text
from worker.triton_configs.config_file import is_bucket
from worker.triton_configs.kinds import BY_FAMILY, BY_NAME, STANDARD_BOUNDS, ConfigKind
from worker.tuners.aiter.spec import risk, tree_version
from worker.tuners.catalog import TunerSpec
from worker.tuners.common.problem import NotImportableError as NotImportableError  # what the check catches
from worker.tuners.search.options import SEARCH_FLAGS, SearchOptions, cost_factor, mapping_rule

NAME = "aiter-triton"


def _is_bucket_of_values(name: str, values: Any) -> bool:
    return is_bucket(name) and isinstance(values, Mapping) and bool(values)


@dataclass(frozen=True, slots=True)
class AiterTritonOptions(SearchOptions):
    """The options of the search and a few more; docs/reference/tuners.md explains them."""

    kind: str = option("", text)  # kind of config (worker/triton_configs/kinds.py), where it is not the family's own
    # Buckets meant for the default file: nothing is searched, they and today's configs are measured.
    default: tuple[tuple[str, Mapping[str, Any]], ...] = option(
        (), mapping_rule(_is_bucket_of_values, "configs by bucket (M_LEQ_x, M_GEQ_x, any)")
    )

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> AiterTritonOptions:
        """Raises ValueError with every fault."""
        options = parse_options(cls, NAME, raw)
        if options.kind and options.kind not in tuned_kinds():
            kinds = ", ".join(tuned_kinds())
            raise ValueError(f"{options.kind!r} is not a kind that can be tuned (there are {kinds})")
        return options


def tuned_kinds() -> tuple[str, ...]:
    """Names of the kinds that this tuner has inputs for."""
    from worker.tuners.aiter_triton.problem import family_of  # here: a command's help reads the specs

    return tuple(kind.name for kind in BY_NAME.values() if family_of(kind))


def kind_of(options: AiterTritonOptions) -> ConfigKind:
    """The kind of a run. Raises ValueError where the family has none."""
    if options.kind:
        return BY_NAME[options.kind]
    if options.family not in BY_FAMILY:
        known = ", ".join(_families({}))
        raise ValueError(f"AITER has no Triton GEMM with config files for {options.family} (but {known})")
    return BY_FAMILY[options.family]


def hash_sources(folder: Path, kind: str) -> str:
    """A hash of a kind's name and of the sources of AITER's Triton GEMMs in `aiter/ops/triton`."""
    digest = hashlib.sha256(kind.encode())
    for path in sorted((*folder.glob("gemm/**/*.py"), *folder.glob("_triton_kernels/**/*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _families(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Families whose shapes the tuner takes: all of them if the kind is named."""
    return tuple(name for name in FAMILIES if options.get("kind") or name in BY_FAMILY)


def _bound_of_m(_: str, key: Mapping[str, Any]) -> int:
    """The bucket of a shape, by its bound: all M of a bucket get one config."""
    return next((x for x in STANDARD_BOUNDS if int(key["M"]) <= x), 0)


SPEC = TunerSpec(
    name=NAME,
    tuner_class="worker.tuners.aiter_triton.tuner:AiterTritonTuner",
    software="aiter",
    parse_options=AiterTritonOptions.parse,
    families=_families,
    slower_families={"a4w4_blockscale": 2.0},
    cost_factor=cost_factor,
    wants_family=True,
    wants_counts=True,
    flags=SEARCH_FLAGS,
    produces="configs",
    risk=risk,
    unit=_bound_of_m,
    mixes=True,
    version=lambda name, device: f"{tree_version(name, device)} triton {device.get('triton') or ''}".strip(),
)
