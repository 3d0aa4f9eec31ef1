"""`db export`: environment lines that a shell takes, names that AITER finds, and warnings of what it would refuse."""

from __future__ import annotations

import fnmatch
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import InputError
from orchestrator.families import get_family
from orchestrator.shapes.reader import read_shapes
from orchestrator.tables.table_names import FORMS, family_of, model_names
from tests.kits.fleet import Done, command
from tests.standins.aiter.kernel_lists import ASM, CK, CK2, tree
from tests.support.tuned_tables import A4W4, line, write_table
from worker.families import FAMILIES, Family


def table(path: Path, *rows: dict[str, Any], of: Family = A4W4, gfx: bool = True) -> Path:
    """A tuned table. Columns that a row does not give get plain defaults."""
    write_table(path, of, *(line(of, **{"kernelName": ASM, "us": 5.0, "K": 64, **row}) for row in rows))
    if not gfx:
        path.write_text(re.sub("^[^,]*,", "", path.read_text(), flags=re.M))
    return path


def export(*args: object) -> Done:
    return command("db", "export", *args)


def test_lines_that_a_shell_takes(tmp_path: Path) -> None:
    a = table(tmp_path / "my tables" / "a4w4_blockscale_tuned_gemm.csv", {"M": 1}, {"M": 2})
    b = table(tmp_path / "b'.csv", {"M": 3}, of=get_family("a16w16"))
    code, out, err = export(a, b, "--env")
    script = out + 'printf "%s\n" "$AITER_CONFIG_GEMM_A4W4" "$AITER_CONFIG_GEMM_BF16"'
    shown = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True, env={})
    assert (code, shown.stdout.splitlines()) == (0, [str(a), str(b)])
    assert "AITER reads the listed tables only" in err


def test_duplicates_are_fatal_and_o_writes_the_fastest_of_each(tmp_path: Path) -> None:
    a = table(tmp_path / "a.csv", {"M": 1, "us": 9.0}, {"M": 2, "us": 1.0})
    b = table(tmp_path / "b.csv", {"M": 1, "us": 4.0}, {"M": 2, "us": 2.0, "gfx": "gfx942"}, gfx=False)
    code, out, err = export(a, b)
    assert (code, out) == (1, "")  # `eval "$(gemmfleet db export ...)"` sets nothing
    assert "2 rows have the key of another row" in err  # b has no gfx column: 256 means gfx950
    assert f"{b}:2 has the key of {a}:2" in err
    merged = tmp_path / "out" / "a4w4_blockscale_tuned_gemm.csv"
    assert export(a, b, "-o", merged.parent)[:2] == (0, f"export AITER_CONFIG_GEMM_A4W4={merged}\n")
    rows = merged.read_text().splitlines()
    assert rows[0] == ",".join(A4W4.tuned_header)
    assert [r.split(",")[:3] + r.split(",")[7:8] for r in rows[1:]] == [
        ["gfx950", "256", "1", "4.0"], ["gfx950", "256", "2", "1.0"],
    ]  # fmt: skip
    export(a, b, "-o", merged.parent, "--force").ok()


def test_mistakes_are_told(tmp_path: Path) -> None:
    a, same = table(tmp_path / "a.csv", {"M": 1}), table(tmp_path / "x" / "a.csv", {"M": 5})
    mixed = table(tmp_path / "m.csv", {"M": 1}, {"M": 2, "kernelName": "torch_lut256_t2"})
    ours = table(tmp_path / "b.csv", {"kernelName": "triton_64x64x64_g8_k1_w4_s3"}, of=get_family("a16w16"))
    of_engine = table(tmp_path / "r1" / "tuned.csv", {"kernelName": "vllm_x"}, of=get_family("a8w8_blockscale"))
    (tmp_path / "r1" / "provenance.json").write_text('{"tuner": "vllm"}')
    (inventory := tmp_path / "inv.yaml").write_text("nodes:\n  a: {transport: ssh, host: 127.0.0.1, port: 1}\n")
    for words, says in (
        ((table(tmp_path / "a:b.csv", {"M": 1}),), "splits the variable"),
        ((a, same, "--at", "/t"), r"two tables would be /t/a\.csv"),
        ((a, "-o", tmp_path, "--family", A4W4.name, "--model", "x", "--env"), "excludes --env and --at"),
        ((a, "--model", "x", "--form", "upside-down"), "give model-first or table-first"),
        *(
            ((a, "--family", A4W4.name, "--model", bad), "--model")
            for bad in ("../x", "my_untuned", "x_bf16_tuned_gemm")
        ),
        ((a, "--gfx", "gfx950"), "together"),
        ((a, "-i", inventory), "give gfx and cu_num"),
        ((mixed,), r"m\.csv:3: torch_lut256_t2 is a kernel of gemmfleet's tuner torch"),
        ((ours,), "a table of gemmfleet's own kernels"),
        ((of_engine,), r"r1: its winners are config files, which no table names; merge them so: .*configs merge"),
        ((a, "--build", tmp_path / "x"), "no AITER tree"),
        ((a, "--build", tmp_path / "nothing"), "is neither a folder with an AITER"),
        ((tmp_path / "no.csv", tmp_path / "neither.csv", "--family", "a8w8"), r"(?s)no\.csv.*neither\.csv"),
    ):
        done = export(*words)
        assert (done.code in (2, 3), bool(re.search(says, done.err))) == (True, True), (says, done)


def test_another_chip(tmp_path: Path) -> None:
    a = table(tmp_path / "a.csv", {"M": 1}, {"M": 1, "cu_num": 128})
    says = "no row is for gfx950 with 304 compute units (it has gfx950 with 128, gfx950 with 256)"
    export(a, "--gfx", "gfx950", "--cu-num", "304").failed_with(1, says)
    (inventory := tmp_path / "inv.yaml").write_text("nodes:\n  a: {gfx: gfx950, cu_num: 256}\n")
    code, _, err = export(a, "-i", inventory)
    assert (code, "1 row is for other chips" in err) == (0, True)


def built(root: Path, *rows: dict[str, Any], by_name: bool = True) -> Path:
    """An AITER tree whose modules were compiled from these rows."""
    tree(root, by_name=by_name, asm=(ASM,))
    table(root / "aiter" / "configs" / A4W4.tuned_csv, *rows)
    return root


@pytest.mark.parametrize(("by_name", "needed"), [(True, 1), (False, 2)])
def test_rebuild_is_needed_for_what_was_not_compiled(tmp_path: Path, by_name: bool, needed: int) -> None:
    root = built(tmp_path / "aiter", {"M": 99, "kernelName": CK}, {"M": 1, "kernelName": CK}, by_name=by_name)
    mine = table(
        tmp_path / "a.csv",
        {"M": 1, "kernelName": CK},  # as shipped
        {"M": 2, "kernelName": CK},  # a kernel that is compiled, for another shape
        {"M": 3, "kernelName": CK2, "kernelId": 1},
        {"M": 4, "kernelName": ASM},  # needs no compiler
    )
    code, out, err = export(mine, "--build", root)
    assert code == 0
    assert f"{needed} of 4 rows with CK winners outside what {root} was compiled from" in err
    assert "# once, then never again: export AITER_REBUILD=1" in out
    assert "3 of 4 rows with CK winners that may be outside" in export(mine).err


def test_no_rebuild_is_advised_for_what_no_build_can_have(tmp_path: Path) -> None:
    """Code generation of AITER raises on names that its lists lack (7136b240e1): the rows are named instead."""
    root = built(tmp_path / "aiter")
    mine = table(tmp_path / "a.csv", {"M": 1, "kernelName": CK}, {"M": 2, "kernelName": CK + "x"})
    code, out, err = export(mine, "--build", root, "-o", tmp_path / "out")
    assert (code, out) == (1, "")
    assert f"1 of 2 rows cannot be loaded by {root}, rebuilt or not" in err
    assert f"{mine}:3: gfx950,256,2,64,64: csrc/ck_gemm_a4w4_blockscale/gemm_a4w4_blockscale_common.py lists no" in err
    assert "AITER_REBUILD" not in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda f: f.name)
def test_aiter_finds_the_names_and_takes_them_for_no_other_family(family: Family, form: str) -> None:
    """By the rule of `get_config_file`: *<table>*.csv without "untuned"."""
    tuned, untuned = model_names("qwen3_235b", family, form)
    for other in FAMILIES.values():
        assert fnmatch.fnmatch(tuned, f"*{Path(other.tuned_csv).stem}*.csv") == (other is family)
    assert "untuned" not in tuned
    assert Path(family.untuned_csv).stem in untuned


def test_model_files_and_their_neighbours(tmp_path: Path) -> None:
    folder = built(tmp_path, {"M": 1, "us": 3.0}) / "aiter" / "configs" / "model_configs"
    mine = table(tmp_path / "mine.csv", {"M": 2, "us": 1.0})
    code, out, _ = export(mine, "--family", A4W4.name, "--model", "llama70B", "-o", folder)
    tuned, twin = (folder / f"llama70B_a4w4_blockscale_{word}_gemm.csv" for word in ("tuned", "untuned"))
    assert (code, out.splitlines()) == (0, [f"written: {tuned}", f"written: {twin}"])
    assert [s.key for s in read_shapes(twin, A4W4).shapes] == [(2, 64, 64)]
    other = table(tmp_path / "other.csv", {"M": 1}, {"M": 2})
    # M=1 is in AITER's own table, M=2 in the other model's
    words = ("--family", A4W4.name, "--model", "x", "--form", "table-first", "-o", folder)
    export(other, *words).failed_with(1, "2 rows have the key of another row")


def test_whose_table(tmp_path: Path) -> None:
    for family in FAMILIES.values():
        assert family_of(table(tmp_path / f"my_{family.tuned_csv}", {}, of=family)) is family
        run = table(tmp_path / family.name / "tuned.csv", {}, of=family)
        (run.parent / "provenance.json").write_text(json.dumps({"family": family.name}))
        assert family_of(run) is family
    for name in ("fmoe", "a16w16"):
        assert family_of(table(tmp_path / "x.csv", {}, of=get_family(name))).name == name
    assert family_of(table(tmp_path / "x.csv", {"kernelName": CK})) is A4W4
    with pytest.raises(InputError, match="a list of shapes"):
        family_of(table(tmp_path / A4W4.untuned_csv, {}))
    with pytest.raises(InputError, match="name it with --family"):
        family_of(table(tmp_path / "x.csv", {"kernelName": "k"}))
