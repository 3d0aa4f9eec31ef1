"""The table of families: consistent in itself, with AITER's tables, and with the docs."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest

from orchestrator.errors import InputError
from orchestrator.families import get_family
from tests.paths import ROOT
from tests.support.families_page import as_markdown
from worker.families import FAMILIES, Family

# AITER's own tables: not part of this repository, used where somebody has put them.
TABLES = Path(os.environ.get("GEMMFLEET_AITER_TABLES", ROOT.parent / "shared" / "data" / "aiter"))
EACH = pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda f: f.name)


def shipped(name: str) -> list[list[str]]:
    path = TABLES / name
    if not path.is_file():
        pytest.skip(f"AITER's {name} is not here (GEMMFLEET_AITER_TABLES names the folder)")
    with path.open(newline="") as f:
        return [[cell.strip() for cell in row] for row in csv.reader(f)]


def test_no_two_families_share_a_table() -> None:
    for name in ("tuned_csv", "untuned_csv", "env"):
        assert len({getattr(f, name) for f in FAMILIES.values()}) == len(FAMILIES), f"two families share a {name}"


@EACH
def test_consistent_in_itself(family: Family) -> None:
    header = family.tuned_header
    assert family.from_aiter(family.aiter_header) == header
    assert family.chip("gfx950", 256) == ("gfx950", 256 if "cu_num" in header else 0)
    assert len(set(header)) == len(header)
    assert family.m_column in family.key_names
    assert family.err_column in family.result_columns
    assert {theirs for _, theirs in family.renames} <= set(family.result_columns)
    assert {x.column for x in family.limits} <= set(family.key_names)
    for c in family.columns:
        assert c.kind == "int" or c.legal, f"{c.name} is text and must have legal values"
        assert c.required or c.default in c.legal
    assert [c.required for c in family.columns] == sorted((c.required for c in family.columns), reverse=True)
    assert family.row_to_columns({}) == dict.fromkeys(family.result_columns, "")


TUNED = ("a16w16", "a8w8_bpreshuffle", "a8w8_blockscale", "a4w4_blockscale", "batched_bf16", "fmoe")
UNTUNED = ("a16w16", "a8w8", "a4w4_blockscale", "batched_bf16", "fmoe")


@pytest.mark.parametrize(("name", "tuned"), [*((n, True) for n in TUNED), *((n, False) for n in UNTUNED)])
def test_shipped_tables_have_our_columns(name: str, tuned: bool) -> None:
    family = get_family(name)
    ours = family.tuned_header if tuned else family.key_names
    there = shipped(family.tuned_csv if tuned else family.untuned_csv)[0]
    assert [c for c in there if c in ours] == [c for c in ours if c in there]
    differ = ({"gfx", *family.late_columns}, {"_tag"}) if tuned and name == "fmoe" else (set(), set())
    assert (set(ours) - set(there), set(there) - set(ours)) == differ


@pytest.mark.parametrize("name", ["a4w4_blockscale", "a8w8_blockscale", "fmoe"])
def test_flops_agree_with_shipped_tflops(name: str) -> None:
    family = get_family(name)
    header, *rows = shipped(family.tuned_csv)
    checked = 0
    for row in (dict(zip(header, r, strict=True)) for r in rows):
        us, tflops = float(row["us"]), float(row["tflops"])
        # AITER rounds to 0.01; shipped fmoe rows below 16 tokens count 16.
        if tflops < 10 or (name == "fmoe" and int(row["token"]) < 16):
            continue
        assert family.flops(dict(row)) / us / 1e6 == pytest.approx(tflops, rel=2e-3)
        checked += 1
    assert checked > 100


def test_flops_and_columns_of_a_row() -> None:
    assert get_family("batched_bf16").flops({"B": 7, "M": 2, "N": 3, "K": 5}) == 420.0
    moe: dict[str, int | str] = {"token": 2, "model_dim": 3, "inter_dim": 5, "topk": 7, "use_g1u1": 1}
    assert get_family("fmoe").flops(moe) == 6 * 2 * 3 * 5 * 7
    row = {"kernelId": 3, "splitK": 2, "us": 1.5, "kernelName": "mm", "libtype": "torch", "errRatio": 0.003}
    a16, fmoe = (get_family(name).row_to_columns(row) for name in ("a16w16", "fmoe"))
    assert (a16["solidx"], a16["err_ratio"], a16["tflops"]) == (3, 0.003, "")
    assert (fmoe["kernelName1"], fmoe["ksplit"], fmoe["err1"], fmoe["us1"]) == ("mm", 2, "0.3%", "")


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("a16w61", "a16w16"), ("A8W8", "a8w8"), ("a4w4", "a4w4_blockscale"), ("\x1b[31m" + "x" * 100, "")],
)
def test_unknown_family_names_the_nearest(wrong: str, near: str) -> None:
    with pytest.raises(InputError) as e:
        get_family(wrong)
    assert str(e.value).partition("did you mean ")[2].partition("?")[0] == near
    assert ("\x1b" in str(e.value), len(str(e.value)) < 250) == (False, True)


def test_docs_hold_the_table() -> None:
    text = (ROOT / "docs" / "reference" / "families.md").read_text()
    assert all(table in text for table in as_markdown().split("\n\n"))
