"""`db check` and `db diff`: AITER's rules row by row, and what differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.families import get_family
from orchestrator.tables.check import check_tables
from tests.kits.fleet import command
from tests.unit.tables.test_table import HEADER
from worker.families import FAMILIES

BLOCKSCALE = "a8w8_blockscale_tuned_gemm.csv"


def good(m: int, time: float = 10.0, **cells: str) -> str:
    row = {"gfx": "gfx950", "cu_num": 256, "M": m, "N": 64, "K": 128, "libtype": "ck", "kernelId": 1, "splitK": 0}
    row |= {"us": time, "kernelName": "a8w8_blockscale_1x128", "tflops": f"{2 * m * 64 * 128 / time / 1e6:.4f}"}
    return ",".join(map(str, (row | {"bw": 20.0, "errRatio": 0.0} | cells).values()))


def table(folder: Path, *lines: str, name: str = BLOCKSCALE, header: str = HEADER) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join((header, *lines)) + "\n")
    return path


def found(path: Path) -> list[tuple[str, str]]:
    (checked,), faults = check_tables([path], None, 0.05)
    assert not faults
    return sorted({(f.rule, f.level) for f in checked.findings})


def test_good_tables_pass(tmp_path: Path) -> None:
    done = command("db", "check", table(tmp_path, good(1), good(2), good(16, 3.25)))
    assert (done.code, done.out.splitlines()[-1]) == (0, "1 table, 3 rows: 0 errors, 0 warnings")
    for family in FAMILIES.values():
        assert found(table(tmp_path, name=family.tuned_csv, header=",".join(family.tuned_header))) == []
    routed = [good(m, libtype="triton", kernelName=name) for m, name in enumerate(("triton", "gluon", "auto"), 1)]
    assert found(table(tmp_path, *routed)) == [], "kernelName names the backend there, or nothing"


@pytest.mark.parametrize(
    ("row", "rule", "level"),
    [
        (good(1) + ",7", "cells", "error"),
        (good(1).rsplit(",", 1)[0], "cells", "warning"),
        (good(1, K=""), "key", "error"),
        (good(1, gfx="", cu_num="7"), "gfx", "warning"),
        (good(1, us="0"), "us", "error"),
        (good(1, kernelName=""), "kernel", "error"),
        (good(1, kernelName="my_kernel", libtype=""), "kernel", "warning"),
        (good(1, libtype="asm"), "libtype", "warning"),
        (good(1, errRatio="0.0501"), "error ratio", "warning"),
        (good(100, tflops="1.0"), "tflops", "warning"),
        (good(1, libtype="gluon", kernelName="gluon"), "libtype", "error"),
    ],
)
def test_each_rule_finds_its_row(tmp_path: Path, row: str, rule: str, level: str) -> None:
    path = table(tmp_path, good(7), row)
    assert (rule, level) in found(path)
    done = command("db", "check", path, "--json")
    document = done.json()
    finding = next(f for f in document["tables"][0]["findings"] if f["rule"] == rule)
    assert finding["examples"][0]["line"] == 3
    assert done.code == (1 if document["errors"] else 0)


def test_cells_that_aiter_evaluates_are_held_to_a_list(tmp_path: Path) -> None:
    family = get_family("a8w8")
    rows = [f"gfx950,256,{m},64,128,{t},1,0,10.0,a8w8_rowwise_x,{2 * m * 64 * 128 / 1e7:.4f},2.0,0.0" for m, t in (
        (1, "torch.int8"), (2, "Torch.Int8"), (3, "__import__('os').system('true')"),
    )]  # fmt: skip
    path = table(tmp_path, *rows, name=family.tuned_csv, header=",".join(family.tuned_header))
    assert found(path) == [("eval", "error"), ("spelling", "warning")]
    assert "a8w8_tuned_gemm.csv:4: eval: q_dtype_w is" in command("db", "check", path).out


def test_duplicates_are_found_in_a_table_and_over_all_that_aiter_merges(tmp_path: Path) -> None:
    assert found(table(tmp_path, good(1), good(2), good(1, 9.0))) == [("duplicate", "error")]
    configs = tmp_path / "aiter" / "configs"
    table(configs, good(1))
    table(configs / "model_configs", good(2), good(1), name="x_" + BLOCKSCALE)
    table(configs / "model_configs", good(1), name="x_a8w8_blockscale_untuned_gemm.csv")
    done = command("db", "check", tmp_path, "--json")
    first, second = done.json()["tables"]
    assert (done.code, first["errors"], second["errors"]) == (1, 0, 1)
    assert second["findings"][0]["examples"][0]["text"].startswith(f"has the key of {configs / BLOCKSCALE}:2")


def test_what_two_tables_differ_in(tmp_path: Path) -> None:
    a = table(tmp_path / "a", good(1), good(2), good(3, 10.0), good(4), good(5))
    rows = [good(9), good(2, 8.0), good(3, 5.0, kernelName="other"), good(4, bw="21.0"), good(5)]
    b = table(tmp_path / "b", *rows, header=HEADER.replace("errRatio", "err"))
    document = command("db", "diff", a, b, "--json").json()
    assert [(r["change"], r["key"]["M"], r["speedup"]) for r in document["rows"]] == [
        ("gone", 1, None), ("us", 2, 1.25), ("kernel", 3, 2.0), ("cells", 4, 1.0), ("added", 9, None),
    ]  # fmt: skip
    assert document["counts"] == {"added": 1, "gone": 1, "kernel": 1, "us": 1, "cells": 1, "same": 1}
    assert (document["columns_gone"], document["columns_added"]) == (["errRatio"], ["err"])
    assert "us     gfx950/256 2x64x128  10 us -> 8 us  1.250x  a8w8_blockscale_1x128" in command("db", "diff", a, b).out
    assert command("db", "diff", a, a).out == "5 the same\n"
