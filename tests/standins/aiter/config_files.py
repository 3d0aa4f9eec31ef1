"""The Triton config files of the fake AITER alone, and a loader of ours in place of AITER's: folders first, flat files
behind.

The loader's text has the marks by which `worker.triton_configs.resolve.read_loader` tells AITER's versions apart. It
runs, so that the trial has something to ask.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.configs.aiter_trial import LoaderArguments, LookupTrial
from orchestrator.configs.winners import AITER_FOLDER, COLUMNS, TABLE
from orchestrator.files.write import write_csv
from tests.standins.aiter import triton_gemm
from tests.support.files import write_files
from worker.triton_configs.kinds import BY_CONFIG, BY_NAME
from worker.triton_configs.resolve import CONFIGS, LOADER, TRITON, Resolver, bucket_for

FOLDERS = """
AITER_TRITON_CONFIGS_PATH = ""
STANDARD_M_BOUNDS = (16, 64, 256, 4096)
def _dtype_dir(name): return "DEFAULT"
def get_gemm_config(config_name, M, N=None, K=None, bounds=None, specialized_filename=None, backend=None, B=None):
    candidates = [f"{AITER_TRITON_CONFIGS_PATH}/gemm"]
"""
NO_FALLBACK = FOLDERS.replace("/gemm", "")
NESTED = (
    FOLDERS.replace("_dtype_dir", "_of").replace("/gemm", "/x/triton/gemm")
    + '    f"{AITER_TRITON_CONFIGS_PATH}/gemm"\n'
)
FLAT = "STANDARD_M_BOUNDS = (16, 64)\ndef get_gemm_config(config_name, M, N=None, K=None, bounds=None): ...\n"


def operator(root: Path, name: str, config: str = "GEMM-A16W16") -> Path:
    """The tree, with a fused operator that reads a config's files: its kernel's module and its wrapper's."""
    kernels, wrapper = f"_triton_kernels/gemm/fused/{name}.py", f"gemm/fused/{name}.py"
    write_files(root / TRITON, {
        kernels: f'def _get_config(M, N, K):\n    return get_gemm_config("{config}", M, N, K)\n',
        wrapper: f"from aiter.ops.triton._triton_kernels.gemm.fused.{name} import _get_config\n",
    })  # fmt: skip
    return root


def values(m: int = 16, **more: Any) -> dict[str, Any]:
    """A bucket's values with all required keys; BLOCK_SIZE_M tells it from others."""
    return triton_gemm.values(m, 64, 128, amd=True, **more)


def tree(root: Path, files: Mapping[str, Any], loader: str = FOLDERS) -> Path:
    """A tree with these files, named below `configs/`; objects become JSON, texts stay."""
    texts = {name: x if isinstance(x, str) else json.dumps(x, indent=2) + "\n" for name, x in files.items()}
    texts = {LOADER.name: loader, **texts}
    return write_files(root, {str(LOADER if n == LOADER.name else CONFIGS / n): text for n, text in texts.items()})


def text_of(root: Path) -> dict[str, str]:
    """Every file of a tree's configs but the lock, by its name below `configs/`."""
    folder = root / CONFIGS
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file() and p.suffix != ".lock"}


def winners(
    run: Path, won: Mapping[str, Mapping[str, Any]], rows: Sequence[Mapping[str, Any]], kind: str = "a16w16"
) -> Path:
    """A run's folder with winners: `won` has the buckets by file, `rows` what differs from the usual row."""
    (run / AITER_FOLDER).mkdir(parents=True)
    usual: dict[str, Any] = {
        "kind": kind, "arch": "gfx950", "shape": [None, 512, 1024], "bucket": "M_LEQ_64", "caller": "", "M": 64,
        "count": 1, "old_us": 20.0, "new_us": 15.0, "err_ratio": 0.0, "old": values(32), "file": next(iter(won)),
    }  # fmt: skip
    full = [{**usual, **row} for row in rows]
    for row in full:
        b, n, k = row["shape"]
        row["shape"] = [b, row.pop("N", n), row.pop("K", k)]
        row["default"] = row["file"] == f"gfx950-{BY_NAME[kind].config}.json"
        row["values"] = won.get(row["file"], {}).get(row["bucket"])
        row["points"] = [[row[c] for c in ("M", "count", "old_us", "new_us", "err_ratio")] + [0, row["caller"]]]
        row["old"] = [row["old"]]
    write_csv(run / AITER_FOLDER / TABLE, COLUMNS, (["-"] * (len(COLUMNS) - 1) + [json.dumps(row)] for row in full))
    return run


def resolved(root: Path, arch: str, calls: Sequence[LoaderArguments], *, alone: bool = False) -> LookupTrial:
    """In place of the trial where no Triton is needed: what a fresh resolver says."""
    fresh = Resolver(root, arch)

    def answer(c: LoaderArguments) -> dict[str, Any]:
        path, _ = fresh.file_for(BY_CONFIG[c["config_name"]], c["N"], c["K"], c["B"])
        buckets = fresh.read(path).buckets
        return buckets[bucket_for(buckets, c["M"], c["bounds"])]

    return LookupTrial(tuple(answer(c) for c in calls), "a stand-in")
