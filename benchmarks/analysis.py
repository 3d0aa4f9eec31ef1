"""`analyze` on 3,000,000 profile rows against a bare `pandas.read_csv(usecols=...)` of the same files, and its memory.

Two profiles of a4w4 as the tuner writes them, 119 candidates a shape (all of a4w4 with split-K). Each side runs in
processes of its own, in turn with the other, and the median of the rounds' ratios counts: neighbours in time see the
same machine. `analyze` is everything up to its document: look for the files, check and read every
line, reduce, gather, pairs, roofline, document.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.figure import Figure

ROWS, CANDIDATES, FILES, ROUNDS = 3_000_000, 119, 2, 7
RATIO, MEMORY_MB = 2.0, 1500.0
_REPORT = """
import json, resource, time
print(json.dumps([time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, found]))
"""
# argv: the folder
_BARE = (
    """
import sys, time, pandas
from pathlib import Path
began = time.perf_counter()
columns = ["cu_num", "M", "N", "K", "kernelId", "us", "kernelName", "tflops", "errRatio"]
found = sum(len(pandas.read_csv(path, usecols=columns)) for path in Path(sys.argv[1]).glob("*.csv"))
"""
    + _REPORT
)
_OURS = (
    """
import sys, time, pandas
from pathlib import Path
from orchestrator.results.analyze import analyze
from orchestrator.results.measurements import find_sources
began = time.perf_counter()
with find_sources([sys.argv[1]], runs=Path("runs")) as sources:
    table = analyze(sources)
found = sum(f["rows"] for f in table["inputs"])
"""
    + _REPORT
)


def run(folder: Path) -> list[Figure]:
    """Ratio of the times and the most memory of `analyze`."""
    size = write(folder)
    bare, ours = [], []
    for _ in range(ROUNDS):
        bare.append(_measure(_BARE, folder))
        ours.append(_measure(_OURS, folder))
    if len(rows := {found for _, _, found in (*bare, *ours)}) != 1:
        raise SystemExit(f"the two sides read different numbers of rows: {rows}")
    ratios = sorted(mine / least for (least, _, _), (mine, _, _) in zip(bare, ours, strict=True))
    middle = [statistics.median(seconds for seconds, _, _ in side) for side in (ours, bare)]
    memory = max(m for _, m, _ in ours)
    what = f"analyze {ROWS:,} profile rows ({size / 1e6:.0f} MB)"
    how = f"{middle[0]:.2f} s against {middle[1]:.2f} s of a bare pandas.read_csv, medians of "
    how += f"{ROUNDS} in turn; ratios {ratios[0]:.2f} to {ratios[-1]:.2f}"
    return [
        Figure(f"{what}: time", statistics.median(ratios), RATIO, "times the bare read", how),
        Figure(f"{what}: memory", memory, MEMORY_MB, "MB", f"most resident of {ROUNDS} processes"),
    ]


def write(folder: Path) -> int:
    """The profiles; returns their bytes."""
    draw = random.Random(7)
    asm = [
        f"_ZN5aiter41f4gemm_bf16_per1x32Fp4_BpreShuffle_{32 * m}x{128 * n}E" for m in range(1, 9) for n in (1, 2, 3, 4)
    ]
    tail = "8x16_16x16_64x1_8x32x1_8x32x1_1x16x1x16_intrawave_v3"
    ck = [f"a4w4_blockscale_256x{64 * m}x{64 * n}x128_{tail}" for m in range(1, 6) for n in range(1, 5)]
    names, size = ck + asm, 0
    for n in range(FILES):
        path = folder / f"fp4_profile_{n}.csv"
        with path.open("w") as f:
            f.write("cu_num,M,N,K,kernelId,splitK,us,kernelName,tflops,bw,errRatio\n")
            for _ in range(ROWS // FILES // CANDIDATES):
                f.writelines(_shape(draw, names))
        size += path.stat().st_size
    return size


def _shape(draw: random.Random, names: list[str]) -> list[str]:
    m, n, k = draw.randrange(1, 70_000), 128 * draw.randrange(1, 500), 256 * draw.randrange(1, 200)
    least, rows = 2 * m * n * k / 5e9, []
    for i in range(CANDIDATES):
        us, luck = least * (1 + draw.random()) + 3, draw.random()
        said = "-1" if luck < 0.07 else "inf" if luck < 0.1 else f"{us:.4f}"
        name = names[i % len(names)] if luck > 0.01 else "Null"
        err = "0.0" if draw.random() > 0.03 else "0.21"
        numbers = f"{2 * m * n * k / us / 1e6:.2f},{draw.random() * 4000:.2f},{err}"
        rows.append(f"256,{m},{n},{k},{i % len(names)},{i // len(names)},{said},{name},{numbers}\n")
    return rows


def _measure(code: str, folder: Path) -> tuple[float, float, int]:
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    seconds, memory, found = json.loads(done.stdout)
    return seconds, memory, found
