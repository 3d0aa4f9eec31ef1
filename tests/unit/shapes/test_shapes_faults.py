"""Faults of a shape list: each kind with its place, and nothing of the file reaches a terminal raw."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.errors import ShapesError
from orchestrator.families import get_family
from orchestrator.shapes.reader import MAX_BYTES, read_shapes
from orchestrator.tables.textfiles import MAX_FAULTS


def faults(path: Path, family: str = "a16w16") -> list[str]:
    """The faults without the file's name, which each must begin with."""
    with pytest.raises(ShapesError) as e:
        read_shapes(path, get_family(family))
    assert e.value.exit_code == 2
    assert all(f.startswith((f"{path}:", "... and ")) and f.isprintable() for f in e.value.faults)
    return [f.removeprefix(f"{path}:").strip() for f in e.value.faults]


def faults_of(tmp_path: Path, data: bytes | str, family: str = "a16w16") -> list[str]:
    path = tmp_path / "s.csv"
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return faults(path, family)


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        ("", "is empty"), ("16.0", "not a whole number"), (".5", "not a whole number"), ("1e3", "not a whole number"),
        ("nan", "not a whole number"), ("+5", "has a sign"), ("-5", "has a sign"), ("0", "is zero"), ("000", "is zero"),
        ("2147483648", "too large"), ("9" * 5000, "too large"), ("=1+1", "looks like a formula"),
        ("-A1", "looks like a formula"), ("@SUM(A1)", "looks like a formula"), ("'5'", "holds a quote"),
        ('5"', "holds a quote"), ('"1,280"', "is not a number"), ("0x10", "is not a number"),
        ("1_000", "is not a number"), ("1 000", "is not a number"), ("\uff11\uff12", "is not a number"),
        ("twelve", "is not a number"),
    ],
)  # fmt: skip
def test_wrong_number(tmp_path: Path, cell: str, says: str) -> None:
    (fault,) = faults_of(tmp_path, f"M,N,K\n1,2,3\n4,{cell},6\n")
    assert fault.startswith("3:N: ")
    assert says in fault
    assert len(fault) < 160


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        ("bf16", "did you mean torch.bfloat16?"),
        ("torch.bfloat", "did you mean torch.bfloat16?"),
        ("TORCH.FLOAT16", "did you mean torch.float16?"),
        ("torch.int8", "legal: torch.bfloat16"),
        ("", "is empty"),
        ("__import__(os)", "is not legal"),
        ("__import__('os').system('true')", "holds a quote"),
        ("=cmd", "looks like a formula"),
    ],
)
def test_wrong_text(tmp_path: Path, cell: str, says: str) -> None:
    (fault,) = faults_of(tmp_path, f"M,N,K,dtype\n1,2,3,{cell}\n")
    assert fault.startswith("2:dtype: ")
    assert says in fault


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("M,N", ["1:K: column K is missing"]),
        ("N", ["1:M: column M is missing", "1:K: column K is missing"]),
        ("m,N,K,m", ["1:m: is in the header twice (columns 1 and 4)"]),
        ("m,M,N,K", ["1:m: is column M once more (columns 2 and 1): drop one"]),
        ("m,n,K,N", ["1:n: is column N once more (columns 4 and 2): drop one"]),
        ("M,N,K,M", ["1:M: is in the header twice (columns 1 and 4)"]),
        ("M,N,K,bais", ["1:bais: unknown column 'bais' for family a16w16; did you mean bias?"]),
        ("M,N,K,out_dtype", ["1:out_dtype: unknown column 'out_dtype' for family a16w16; did you mean outdtype?"]),
        ("M,N,KK", ["1:K: column K is missing: family a16w16 needs it (other columns here: 'KK')"]),
        ("M,N,K,", ["1:column 4: a column without a name"]),
        ('M",N,K', ["1:column 1: 'M\"' holds a quote"]),
        ("M;N;K", ["1: the columns are separated by ';'"]),
        ("M\tN\tK", ["1: the columns are separated by tabs"]),
        ("16,32,64", ["1: there is no header: the first line must name the columns, M,N,K"]),
        (",".join(f"c{i}" for i in range(300)), ["1: the header has 300 columns"]),
    ],
)
def test_wrong_header(tmp_path: Path, header: str, expected: list[str]) -> None:
    row = ",".join("1" for _ in header.split(","))
    found = faults_of(tmp_path, f"{header}\n{row}\n")
    assert len(found) == len(expected)
    assert all(f.startswith(x) for f, x in zip(found, expected, strict=True))


def test_family_without_m_and_n(tmp_path: Path) -> None:
    found = faults_of(tmp_path, "M,N,K\n1,2,3\n", "fmoe")
    assert [f.split(":")[1] for f in found] == [*get_family("fmoe").key_names[:5]]
    assert all("other columns here: 'M', 'N', 'K'" in f for f in found)
    assert faults_of(tmp_path, "M,N,K\n1,2,3\n", "batched_bf16") == [
        "1:B: column B is missing: family batched_bf16 needs it"
    ]


def test_rows_of_the_wrong_length(tmp_path: Path) -> None:
    assert faults_of(tmp_path, "M,N,K\n1,2\n1,2,3,4\n1,2,3,\n5\n") == [
        "2:K: the row is too short: it has 2 cells, the header 3",
        "3:column 4: the row is too long: it has 4 cells, the header 3",
        "4:column 4: the row is too long: it has 4 cells, the header 3",
        "5:N: the row is too short: it has 1 cells, the header 3",
    ]


def test_a_stray_quote_is_called_a_quote_not_a_long_row(tmp_path: Path) -> None:
    found = faults_of(tmp_path, 'M,N,K\n"1,280" x,2,3\n')
    assert [f[:5] for f in found] == ["2:M: ", "2:N: "]
    assert all("holds a quote" in f for f in found)


def test_comment(tmp_path: Path) -> None:
    assert faults_of(tmp_path, "M,N,K\n# decode\n1,2,3\n") == ["2: a comment: a shapes file has none, drop the line"]


def test_limit_of_a_family(tmp_path: Path) -> None:
    (fault,) = faults_of(tmp_path, "M,N,K\n1,2,64\n1,2,48\n", "a4w4_blockscale")
    assert fault.startswith("3:K: 48 is not a multiple of 32")


def test_all_at_once_and_lines_count_as_in_an_editor(tmp_path: Path) -> None:
    found = faults_of(tmp_path, "\r\nM,N,dtype\r\n\r\n0,x,fp32\r\n\r\n1,2\r\n3,4,torch.float16\r\n-1,5,torch.int4\r\n")
    assert [f.split(": ")[0] for f in found] == ["2:K", "4:M", "4:N", "4:dtype", "6:dtype", "8:M", "8:dtype"]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "is empty"),
        (b"\n \n,,\n", "is empty"),
        (b"\xef\xbb\xbf", "is empty"),
        (b"M,N,K\n", "no shapes"),
        (b"M,N,K\n\n\n", "no shapes"),
        (b"M,N,K\n1,2,\x00\n", "2: is a binary file"),
        (b"\x7fELF\x02\x01\x00", "1: is a binary file"),
        (b"PK\x03\x04rest", "a zip archive or a workbook"),
        ("M,N,K\n1,2,3\n".encode("utf-16"), "is UTF-16"),
        (b"\x1f\x8b\x08", "compressed by gzip"),
        (b"M,N,K\n1,2,\xe9\n", r"2:K: '\xe9' holds bytes that are not UTF-8"),
    ],
)
def test_wrong_file(tmp_path: Path, data: bytes, says: str) -> None:
    (fault,) = faults_of(tmp_path, data)
    assert says in fault


def test_no_file_directory_pipe_and_size(tmp_path: Path) -> None:
    assert faults(tmp_path / "none.csv") == ["no such file"]
    assert faults(tmp_path) == ["is a directory, not a file"]
    os.mkfifo(tmp_path / "pipe")
    assert faults(tmp_path / "pipe") == ["is not a regular file"]
    with (tmp_path / "big.csv").open("wb") as f:
        f.truncate(MAX_BYTES + 1)
    assert faults(tmp_path / "big.csv") == ["is larger than 64 MiB, which is no list of this kind"]
    with pytest.raises(ShapesError, match="is not a file name"):
        read_shapes("a\0b", get_family("a16w16"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file(tmp_path: Path) -> None:
    path = tmp_path / "s.csv"
    path.write_text("M,N,K\n1,2,3\n")
    path.chmod(0)
    assert faults(path) == ["cannot be read: Permission denied"]


def test_control_characters_are_never_echoed(tmp_path: Path) -> None:
    path = tmp_path / "\x1b[31mred.csv"
    path.write_text("M,N,\x1b]0;x\x07\n\x1b[2J,\u202e1,\x9b\n")
    with pytest.raises(ShapesError) as e:
        read_shapes(path, get_family("a16w16"))
    assert len(e.value.faults) == 3
    assert all(f.isprintable() for f in e.value.faults)
    assert r"\x1b[31mred.csv" in e.value.faults[0]


def test_many_faults_are_counted(tmp_path: Path) -> None:
    found = faults_of(tmp_path, "M,N,K\n" + "0,0,1\n" * 100)
    assert len(found) == MAX_FAULTS + 1
    assert found[-1] == f"... and {200 - MAX_FAULTS} more"


def test_wrong_overrides_come_with_the_files_faults(tmp_path: Path) -> None:
    path = tmp_path / "s.csv"
    path.write_text("M,N,K\n0,2,3\n")
    with pytest.raises(ShapesError) as e:
        read_shapes(path, get_family("a16w16"), overrides={"K": "5", "bias": "maybe", "x": "y"})
    assert [f.removeprefix(f"{path}: ").removeprefix(f"{path}:")[:12] for f in e.value.faults] == [
        "'K' cannot b", "bias: value ", "'x' cannot b", "2:M: is zero",
    ]  # fmt: skip
