"""Tables of a family whose columns AITER calls otherwise, and which have no cu_num, through every reader and writer."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from orchestrator.cli.files import shape_of
from orchestrator.controller.prepare import drop_tuned
from orchestrator.families import get_family
from orchestrator.shapes.model import Shape
from orchestrator.tables.check import check
from orchestrator.tables.export import never_selected
from orchestrator.tables.merge import merge
from orchestrator.tables.tuned import read_table

FAMILY = get_family("batched_gemm_a8w8_blockscale_mxscale")
HEADER = "gfx,b,m,n,k,libtype,kernelId,splitK,us,kernelName,tflops,bw,errRatio"
KERNEL = "opus_bmm_a8w8_mxscale_flatmm_splitk_256x16x32x512_1x2_16x16x128_1x128x128_wgpcu2"


def line(m: int, us: float = 8.0, b: int = 2) -> str:
    rate = 2 * b * m * 1024 * 4096 / us / 1e6
    return f"gfx950,{b},{m},1024,4096,opus,311,1,{us},{KERNEL},{rate:.1f},{1000.0},0.0015"


def table(path: Path, *lines: str) -> Path:
    path.write_text("\n".join((HEADER, *lines)) + "\n")
    return path


def new(m: int, us: float) -> dict[str, Any]:
    """A row as a run has it."""
    return {
        "gfx": "gfx950", "cu_num": 256, "B": 2, "M": m, "N": 1024, "K": 4096, "libtype": "opus", "kernelId": 32,
        "splitK": 2, "us": us, "kernelName": KERNEL, "tflops": 1.0, "bw": 2.0, "errRatio": 0.001,
    }  # fmt: skip


def test_a_merge_writes_aiter_s_columns_and_finds_its_keys_again(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    assert merge([new(1, 9.0), new(4, 9.0)], path, FAMILY).count("added") == 2
    assert path.read_text().splitlines()[0] == HEADER
    report = merge([new(1, 5.0), {**new(4, 20.0), "cu_num": 128}], path, FAMILY)
    assert [(r.action, r.key["M"]) for r in report.rows] == [("replaced", 1), ("kept", 4)]
    with path.open() as f:
        assert [(r["b"], r["m"], r["n"], r["k"], r["us"]) for r in csv.DictReader(f)] == [
            ("2", "1", "1024", "4096", "5.0"), ("2", "4", "1024", "4096", "9.0"),
        ]  # fmt: skip
    assert shape_of(report.rows[0].key) == "gfx950 2x1x1024x4096"


def test_check_finds_nothing_wrong_with_aiter_s_table(tmp_path: Path) -> None:
    path = table(tmp_path / "dsv4_batched_gemm_a8w8_blockscale_mxscale_tuned.csv", line(1), line(4))
    (checked,), faults = check([path], None, 0.02)
    assert not faults
    assert (checked.family, checked.rows, dict(checked.chips)) == (FAMILY.name, 2, {"gfx950": 2})
    assert not checked.findings
    table(path, line(1), line(1, 9.0))
    (checked,), _ = check([path], None, 0.02)
    assert [f.rule for f in checked.findings] == ["duplicate"]


def test_a_row_serves_every_size_of_its_chip(tmp_path: Path) -> None:
    path = table(tmp_path / "t.csv", line(1))
    shapes = [Shape(1, (2, 1, 1024, 4096)), Shape(2, (2, 4, 1024, 4096))]
    for cu_num in (256, 128):
        assert [s.id for s in drop_tuned(shapes, FAMILY, path, "gfx950", cu_num).todo] == [2]
    dropped = drop_tuned(shapes, FAMILY, path, "gfx942", 304)
    assert dropped.notes == [f"{path} has no row for gfx942 (it has gfx950): nothing is skipped"]
    source = read_table(path, FAMILY)
    assert never_selected(source, [("gfx950", 256)]) == []
    (found,) = never_selected(source, [("gfx942", 304)])
    assert "no row is for gfx942 (it has gfx950)" in found.text
