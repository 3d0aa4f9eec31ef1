"""`db check` and `db diff`: AITER's rules row by row, and what differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.errors import InputError
from orchestrator.families import get_family
from orchestrator.tables.check import check
from orchestrator.tables.kinds import kind_of
from tests.unit.tables.test_tuned_db import HEADER, SHIPPED
from worker.families import FAMILIES

BLOCKSCALE = "a8w8_blockscale_tuned_gemm.csv"
GOOD = "gfx950,256,{m},64,128,ck,1,0,{us},a8w8_blockscale_1x128,{tflops},20.0,0.0"


def good(m: int, us: float | str = 10.0, **cells: str) -> str:
    tflops = 2 * m * 64 * 128 / (us if isinstance(us, float) else 10.0) / 1e6
    text = GOOD.format(m=m, us=us, tflops=f"{tflops:.4f}")
    row = dict(zip(HEADER.split(","), text.split(","), strict=True)) | cells
    return ",".join(row.values())


def table(folder: Path, *lines: str, name: str = BLOCKSCALE, header: str = HEADER) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join((header, *lines)) + "\n")
    return path


def cli(*words: object) -> Any:
    return CliRunner().invoke(app, ["db", *map(str, words)])


def found(path: Path) -> list[tuple[str, str]]:
    (checked,), faults = check([path], None, 0.05)
    assert not faults
    return sorted({(f.rule, f.level) for f in checked.findings})


def test_a_good_table_passes(tmp_path: Path) -> None:
    path = table(tmp_path, good(1), good(2), good(16, 3.25))
    assert found(path) == []
    done = cli("check", path)
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, "1 table, 3 rows: 0 errors, 0 warnings")


@pytest.mark.parametrize(
    ("row", "rule", "level"),
    [
        (good(1) + ",7", "cells", "error"),
        (good(1).rsplit(",", 1)[0], "cells", "warning"),
        (",".join(good(1).split(",")[:6]), "cells", "error"),
        (good(1, K=""), "key", "error"),
        (good(1, K="0"), "key", "error"),
        (good(1, K="12.5"), "key", "error"),
        (good(1, gfx="", cu_num="7"), "gfx", "warning"),
        (good(1, us="0"), "us", "error"),
        (good(1, us="-1"), "us", "error"),
        (good(1, us="Null"), "us", "error"),
        (good(1, us="inf"), "us", "error"),
        (good(1, kernelName=""), "kernel", "error"),
        (good(1, kernelName="my_kernel", libtype=""), "kernel", "warning"),
        (good(1, libtype="asm"), "libtype", "warning"),
        (good(1, errRatio="0.0501"), "error ratio", "warning"),
        (good(1, errRatio="-1"), "error ratio", "warning"),
        (good(100, tflops="1.0"), "tflops", "warning"),
        (good(100, bw="0.0033"), "bw", "warning"),
        (good(1, libtype="gluon", kernelName="gluon"), "libtype", "error"),
    ],
)
def test_each_rule_finds_its_row(tmp_path: Path, row: str, rule: str, level: str) -> None:
    path = table(tmp_path, good(7), row)
    assert (rule, level) in found(path)
    done = cli("check", path, "--json")
    document = json.loads(done.stdout)
    finding = next(f for f in document["tables"][0]["findings"] if f["rule"] == rule)
    assert finding["examples"][0]["line"] == 3
    assert done.exit_code == (1 if document["errors"] else 0)


def test_rows_that_are_routed_to_triton_are_aiter_s(tmp_path: Path) -> None:
    """`kernelName` names the backend there, or nothing; rows without figures are warned of, as AITER ships some."""
    rows = [good(m, libtype="triton", kernelName=name) for m, name in enumerate(("triton", "gluon", "auto"), 1)]
    path = table(tmp_path, *rows)
    (checked,), _ = check([path], None, 0.05)
    assert (checked.findings, dict(checked.kinds)) == ([], {"aiter": 3})
    assert kind_of({"kernelName": "gluon"}) == "aiter"


def test_an_import_counts_rows_in_tb(tmp_path: Path) -> None:
    path = table(tmp_path, good(100, bw="0.0033"), good(7))
    done = cli("merge", path, "--into", tmp_path / "db.csv")
    assert done.exit_code == 0, done.stderr
    assert "bw of 1 row is in TB/s" in done.stderr
    assert "0.0033" in (tmp_path / "db.csv").read_text()


def test_cells_that_aiter_evaluates_are_held_to_a_list(tmp_path: Path) -> None:
    family = get_family("a8w8")
    header = ",".join(family.tuned_header)
    rows = [f"gfx950,256,{m},64,128,{t},1,0,10.0,a8w8_rowwise_x,{2 * m * 64 * 128 / 1e7:.4f},2.0,0.0" for m, t in (
        (1, "torch.int8"), (2, "Torch.Int8"), (3, "__import__('os').system('true')"),
    )]  # fmt: skip
    path = table(tmp_path, *rows, name=family.tuned_csv, header=header)
    assert found(path) == [("eval", "error"), ("spelling", "warning")]
    assert "a8w8_tuned_gemm.csv:4: q_dtype_w is" in cli("check", path).stdout


def test_duplicates_are_found_in_a_table_and_over_all_that_aiter_merges(tmp_path: Path) -> None:
    path = table(tmp_path, good(1), good(2), good(1, 9.0))
    assert found(path) == [("duplicate", "error")]
    configs = tmp_path / "aiter" / "configs"
    table(configs, good(1))
    table(configs / "model_configs", good(2), good(1), name="x_" + BLOCKSCALE)
    table(configs / "model_configs", good(1), name="x_a8w8_blockscale_untuned_gemm.csv")
    done = cli("check", tmp_path, "--json")
    assert done.exit_code == 1
    first, second = json.loads(done.stdout)["tables"]
    assert (first["errors"], second["errors"]) == (0, 1)
    assert second["findings"][0]["examples"][0]["text"].startswith(f"has the key of {configs / BLOCKSCALE}:2")


def test_what_cannot_be_read_is_named_and_the_others_are_checked(tmp_path: Path) -> None:
    path = table(tmp_path, good(1))
    bad = tmp_path / ("bad_" + BLOCKSCALE)
    bad.write_text(f'{HEADER}\n"{good(1)}\n')
    done = cli("check", bad, path, "--json")
    assert isinstance(done.exception, InputError)
    document = json.loads(done.stdout)
    assert len(document["tables"]) == 1
    assert document["faults"] == done.exception.faults
    assert "is no CSV line" in document["faults"][0]


@pytest.mark.skipif(not SHIPPED.is_dir(), reason="AITER's tables do not lie beside this checkout")
def test_the_tables_that_aiter_ships_have_no_error() -> None:
    checked, faults = check([SHIPPED], None, 0.05)
    assert not faults
    assert len(checked) >= 5
    assert [(c.path.name, c.findings) for c in checked if c.count("error")] == []
    assert all(c.rows for c in checked)


def test_every_familys_own_header_is_legal(tmp_path: Path) -> None:
    for family in FAMILIES.values():
        path = table(tmp_path, name=family.tuned_csv, header=",".join(family.tuned_header))
        assert found(path) == []


# --- diff -------------------------------------------------------------------------------------------------------------


def test_what_two_tables_differ_in(tmp_path: Path) -> None:
    a = table(tmp_path / "a", good(1), good(2), good(3, 10.0), good(4), good(5))
    rows = [good(9), good(2, 8.0), good(3, 5.0, kernelName="other"), good(4, bw="21.0"), good(5)]
    b = table(tmp_path / "b", *rows, header=HEADER.replace("errRatio", "err"))
    assert "errRatio" not in b.read_text()
    done = cli("diff", a, b, "--json")
    assert done.exit_code == 0
    document = json.loads(done.stdout)
    assert [(r["change"], r["key"]["M"], r["speedup"]) for r in document["rows"]] == [
        ("gone", 1, None), ("us", 2, 1.25), ("kernel", 3, 2.0), ("cells", 4, 1.0), ("added", 9, None),
    ]  # fmt: skip
    assert document["counts"] == {"added": 1, "gone": 1, "kernel": 1, "us": 1, "cells": 1, "same": 1}
    assert (document["columns_gone"], document["columns_added"]) == (["errRatio"], ["err"])
    text = cli("diff", a, b).stdout
    assert "us     gfx950/256 2x64x128  10 us -> 8 us  1.250x  a8w8_blockscale_1x128" in text
    assert cli("diff", a, a).stdout == "5 the same\n"


def test_short_rows_of_aiters_are_filled_up_as_it_does(tmp_path: Path) -> None:
    path = table(tmp_path, good(1).rsplit(",", 2)[0], good(2))
    done = cli("merge", path, "--into", tmp_path / "db.csv", "--err-ratio", "1")
    assert "filled up 1 row short of cells" in done.stderr
    path.write_text(path.read_text() + good(3).rsplit(",", 2)[0])
    done = cli("merge", path, "--into", tmp_path / "db.csv", "--err-ratio", "1")
    assert "t.csv:4" in str(done.exception).replace(path.name, "t.csv"), "cut off in its last line"
