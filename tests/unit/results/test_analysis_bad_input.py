"""Files that are damaged or foreign: reported with file and line, or left out and counted; memory stays bounded."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.errors import InputError
from tests.support.analysis_kit import A4W4, ASM, a4w4, analyse, asm_us, only, write
from tests.support.command import command


def fp4(tmp_path: Path, *rows: str) -> Path:
    return write(tmp_path / "fp4_profile_a.csv", A4W4, rows)


def test_a_line_cut_short_is_left_out_and_named(tmp_path: Path) -> None:
    path = fp4(tmp_path, a4w4(8.0), "256,64,512,1024,30,0,3.", a4w4(9.0), a4w4(2.0) + ",1,2")
    table = analyse(path)
    assert asm_us(table) == 8.0
    assert table["left_out"]["malformed"] == 2
    assert any(f"{path}:3: 2 lines are not rows" in n and "line 3, 5" in n for n in table["notes"])


def test_a_last_line_without_its_end_does_not_count(tmp_path: Path) -> None:
    path = fp4(tmp_path, a4w4(8.0))
    path.write_text(path.read_text() + a4w4(4.0, err="0.0"))  # may have been 0.05 or 0.3
    table = analyse(path)
    assert (asm_us(table), table["left_out"]["malformed"]) == (8.0, 1)
    assert any("no line end" in n for n in table["notes"])
    path.write_text(A4W4 + "\n" + a4w4(8.0) + "\n256,64,5")
    assert analyse(path)["left_out"]["malformed"] == 1


def test_bytes_that_are_not_utf8_cost_their_row(tmp_path: Path) -> None:
    path = fp4(tmp_path, a4w4(8.0))
    path.write_bytes(path.read_bytes() + a4w4(1.0).replace(ASM, "@").encode().replace(b"@", b"_ZN\xff") + b"\n")
    table = analyse(path)
    assert asm_us(table) == 8.0
    assert table["left_out"]["malformed"] == 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"), (b"\n\n", "is empty"), (b"PK\x03\x04....", "workbook"), (b"M,N\0,K\n", "binary"),
        (b"\xff\xfeM\0", "UTF-16"), (b"M,N,K\n1,2,3\n", "no column of times"), (b"us,x\n1,2\n", "has no M, N and K"),
        (b"M,N,K,us,us\n1,2,3,4,5\n", "column us is there twice"), (b"M" * 70_000 + b"\n", "longer than"),
        (A4W4.encode() + b"\n", "there are no rows"),
    ],
)  # fmt: skip
def test_what_is_no_table_is_refused_by_name(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "fp4_profile_a.csv"
    path.write_bytes(content)
    with pytest.raises(InputError, match=says) as e:
        analyse(path)
    assert path.name in str(e.value)


@pytest.mark.parametrize(("kernel", "says"), [('"' + ASM, "opens a quote"), ("\0", "holds a NUL byte")])
def test_a_damaged_line_is_named_instead_of_swallowing_the_rest(tmp_path: Path, kernel: str, says: str) -> None:
    with pytest.raises(InputError, match=rf"fp4_profile_a\.csv:1002: {says}"):
        analyse(fp4(tmp_path, *[a4w4(8.0)] * 1000, a4w4(7.0, kernel), *[a4w4(6.0)] * 5))


def test_mixed_line_ends_are_line_ends(tmp_path: Path) -> None:
    path = fp4(tmp_path, a4w4(8.0))
    path.write_bytes((A4W4 + "\r\n" + a4w4(8.0) + "\n" + a4w4(7.0) + "\r\n\n" + a4w4(9.0) + "\r").encode())
    table = analyse(path)
    assert (asm_us(table), table["inputs"][0]["rows"], table["left_out"]["malformed"]) == (7.0, 3, 0)


def test_quoted_cells_are_cells(tmp_path: Path) -> None:
    shape = only(analyse(fp4(tmp_path, a4w4(8.0, '"' + ASM + ',x ""1"""'), a4w4(9.0))))
    assert shape["backends"]["asm"]["kernel"] == ASM + ',x "1"'


def test_a_long_line_is_found_by_its_number_in_bounded_memory(tmp_path: Path) -> None:
    path = fp4(tmp_path, *[a4w4(8.0)] * 20_000)
    with path.open("r+b") as f:
        f.seek(0, 2)
        f.truncate(f.tell() + 2**30)  # a line of a gigabyte, sparse: nothing is written
    with pytest.raises(InputError, match=r"fp4_profile_a\.csv:20002: is longer than 128 KiB"):
        analyse(path)


def test_names_with_wildcards_and_quotes_are_only_names(tmp_path: Path) -> None:
    folder = tmp_path / "it's [odd] *"
    folder.mkdir()
    path = write(folder / "fp4_profile_?'.csv", A4W4, [a4w4(8.0)])
    assert asm_us(analyse(path)) == asm_us(analyse(folder)) == 8.0


def test_sources_are_never_written(tmp_path: Path) -> None:
    path = fp4(tmp_path, a4w4(8.0))
    before = path.read_bytes()
    done = command("analyze", str(path), "-o", str(path), "--format", "csv")
    assert (done.code, path.read_bytes()) == (2, before)
    assert "one of the inputs" in done.err
