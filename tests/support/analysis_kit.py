"""Small tables for the tests of the analysis."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.families import get_family
from orchestrator.results.analyze import analyze
from orchestrator.results.measurements import find_sources
from tests.paths import ROOT

TABLES = Path(os.environ.get("AITER_TABLES", ROOT.parent / "shared" / "data" / "aiter"))
"""The tables that AITER ships, if they are there."""
needs_tables = pytest.mark.skipif(
    not (TABLES / "a4w4_blockscale_tuned_gemm.csv").is_file(),
    reason="AITER's shipped tables are not here (AITER_TABLES names their folder)",
)

A4W4 = "cu_num,M,N,K,kernelId,splitK,us,kernelName,tflops,bw,errRatio"
ASM = "_ZN5aiter41f4gemm_bf16_per1x32Fp4_BpreShuffle_32x128E"
CK = "a4w4_blockscale_256x64x128x128_v3"


def a4w4(us: object, kernel: str = ASM, shape: str = "64,512,1024", err: object = 0.0, number: int = 30) -> str:
    """A profile row of a4w4 as the runbook's image writes it."""
    return f"256,{shape},{number},0,{us},{kernel},0.0,1.0,{err}"


def write(path: Path, header: str, rows: Iterable[str], end: str = "\n") -> Path:
    """A CSV, its lines ended by `end`."""
    path.write_bytes((end.join([header, *rows]) + end).encode())
    return path


def analyse(path: Path, family: str | None = None, **more: Any) -> dict[str, Any]:
    """The document of a file or folder."""
    with find_sources([str(path)], runs=path / "runs", family=get_family(family) if family else None) as sources:
        return analyze(sources, **more)


def only(document: dict[str, Any]) -> dict[str, Any]:
    """The document's only shape."""
    (shape,) = document["rows"]
    assert isinstance(shape, dict)
    return shape


def times(document: dict[str, Any]) -> list[dict[str, float]]:
    """The times of each shape by backend."""
    return [{b: x["us"] for b, x in row["backends"].items()} for row in document["rows"]]
