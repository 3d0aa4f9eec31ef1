"""What the columns of a profile, a tuned table or a benchmark mean, by name, whatever their date and order.

Names that changed over AITER's history, or differ between families: solidx for kernelId, err_ratio for errRatio,
total_us for us (fmoe, before 2025-11). Benchmarks are long (`backend,us`) or wide (`triton_us,triton_tflops,...`).
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.tables.backends import OWNER_COLUMN, legal_name, owned
from worker.families import Family

_ALIASES = {
    "us": ("us", "time_us", "total_us"),
    "err": ("errratio", "err_ratio", "err"),
    "kernel": ("kernelname", "kernel_name", "kernelname1", "kernel"),
    "kernel_id": ("kernelid", "kernel_id", "solidx"),
    "libtype": ("libtype", "backend"),
    "tflops": ("tflops",),
    "gfx": ("gfx",),
    "cu_num": ("cu_num",),
}
_US, _TFLOPS = "_us", "_tflops"


@dataclass(frozen=True, slots=True)
class Wide:
    """The columns of one backend in a wide benchmark, by number; `tflops` None where there is none, `told` that of
    the column that says whose these are."""

    backend: str
    us: int
    tflops: int | None
    told: int | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """Where in the header what stands, by column number. `keys` holds the family's key columns that are there."""

    at: dict[str, int]
    keys: dict[str, int]
    wide: tuple[Wide, ...]

    @property
    def times(self) -> bool:
        """Whether the file holds measurements."""
        return "us" in self.at or bool(self.wide)


def layout(header: tuple[str, ...], family: Family) -> Layout:
    """The layout of a header for a family."""
    lower = {name.lower(): i for i, name in reversed(list(enumerate(header))) if name}
    at = {
        role: next(lower[n] for n in names if n in lower)
        for role, names in _ALIASES.items()
        if lower.keys() & set(names)
    }
    keys = {c.name: lower[c.name.lower()] for c in family.columns if c.name.lower() in lower}
    wide = []
    if "us" not in at:
        for name, i in sorted(lower.items(), key=lambda item: item[1]):
            backend = legal_name(name.removesuffix(_US)) if name.endswith(_US) else None
            if backend:
                told = lower.get(OWNER_COLUMN) if backend == "triton" else None
                wide.append(Wide(owned(backend), i, lower.get(backend + _TFLOPS), told))
    return Layout(at, keys, tuple(wide))


def missing(found: Layout, family: Family) -> list[str]:
    """The key columns that the file lacks and that have no default."""
    return [c.name for c in family.columns if c.required and c.name not in found.keys]


def doubled(header: tuple[str, ...]) -> list[str]:
    """Names that stand in the header twice."""
    return sorted({n for n in header if n and header.count(n) > 1})
