"""What the columns of a CSV of timings mean: kernel, shape, time, repeat, or a result that nobody joins by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.tables.backends import OWNER_COLUMN
from orchestrator.tables.faults import did_you_mean, escaped, shown
from worker.families import FAMILIES

TIMES = ("us", "time_us")
KERNELS = (
    ("kernel",),
    ("backend", "op"),
    ("kernelName",),
    ("kernelName1", "kernelName2"),
    ("kernelName1",),
    ("backend",),
)
"""Columns that name the kernel, the first that is there."""
RUNS = ("run", "repeat")
CHIP = ("gfx", "cu_num")
ORDER = "order"
STATUS = "status"
_SHAPE = {name for f in FAMILIES.values() for name in f.key_names}
# fmt: off
RESULTS = {
    *(c for f in FAMILIES.values() for c in f.result_columns if c not in ("splitK", "libtype") and c not in _SHAPE),
    "attempt", "node", "slot", "spread", "samples", "winner", "detail", "env", "gbps", "GB/s", "tflops", "TFLOPS",
    "std", "stddev", "min_us", "max_us", "median_us", "mean_us", "error", "errors", "captured", "timestamp", "_tag",
    "op", "timer", "fastest", OWNER_COLUMN,
}
# fmt: on
_OF_RUNS = ("_spread", "_samples", "_status")
"""What a bench.csv says of a backend besides its time."""
MAX_COLUMNS = 256


@dataclass(frozen=True, slots=True)
class Columns:
    """Where a file has what. `shape` are (name, place); `times` are (kernel or None, place), several in a wide file.

    `lenient`: the file is a tuner's or a wide one, in which a row without a time is ordinary.
    """

    names: tuple[str, ...]
    kernel: tuple[int, ...]
    shape: tuple[tuple[str, int], ...]
    times: tuple[tuple[str | None, int], ...]
    run: int | None
    order: int | None
    status: int | None
    chip: tuple[tuple[str, int], ...]
    lenient: bool
    told: int | None = None

    @property
    def shape_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.shape)


def is_timing(header: Sequence[str]) -> bool:
    """Whether a header is that of timings, and not of a comparison that was written here."""
    names = [h.strip() for h in header]
    return "verdict" not in names and any(n in TIMES or n.endswith("_us") for n in names)


def read_columns(header: Sequence[str], dropped: Sequence[str] = ()) -> Columns | list[str]:
    """The meaning of a header without the columns that are `dropped`; what is wrong with it where it has none."""
    names = tuple(h.strip() for h in header)
    if len(names) > MAX_COLUMNS:
        return [f"the header has {len(names)} columns, which is no table of timings"]
    faults = [f"column {shown(n)} is there {c} times: drop one" for n, c in Counter(names).items() if c > 1]
    faults += [f"column {i} has no name: name it or drop it" for i, n in enumerate(names, 1) if not n]
    if faults:
        return faults
    at = {name: i for i, name in enumerate(names)}
    time = next((at[t] for t in TIMES if t in at), None)
    wide = {n.removesuffix("_us"): i for n, i in at.items() if n.endswith("_us") and n not in (*TIMES, *RESULTS)}
    kernel = next((tuple(at[n] for n in some) for some in KERNELS if all(n in at for n in some)), ())
    if time is None and (not wide or kernel):
        near = next((d for n in names if (d := did_you_mean(n, TIMES)) and "us" in n.lower()), "")
        return [f"has no column us or time_us{near}; its columns are {escaped(', '.join(names))[:300]}"]
    if time is not None and not kernel:
        return [f"has no column kernel (or kernelName, or backend); its columns are {escaped(', '.join(names))[:300]}"]
    used = {
        *kernel,
        *(at[n] for n in (*TIMES, *RUNS, *CHIP, ORDER, STATUS) if n in at),
        *(at.get(d, -1) for d in dropped),
    }
    if time is None:
        used |= {i for n, i in at.items() if n.endswith(("_us", "_tflops"))}
    shape = tuple((n, i) for n, i in at.items() if i not in used and n not in RESULTS and not n.endswith(_OF_RUNS))
    if not shape:
        return ["has no column of a shape, such as M,N,K"]
    return Columns(
        names,
        kernel,
        shape,
        ((None, time),) if time is not None else tuple(wide.items()),
        next((at[r] for r in RUNS if r in at), None),
        at.get(ORDER),
        at.get(STATUS),
        tuple((n, at[n]) for n in CHIP if n in at),
        time is None or names[kernel[0]] != "kernel",
        at.get(OWNER_COLUMN),
    )
