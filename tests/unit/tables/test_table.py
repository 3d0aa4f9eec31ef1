"""Merging into a tuned table: who wins, what stays byte for byte, and that nothing is ever half done."""

from __future__ import annotations

import fcntl
import itertools
import os
import random
import re
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import TunedDBError
from orchestrator.families import get_family
from orchestrator.files import scratch
from orchestrator.files.lock import locked
from orchestrator.planning.skipped_shapes import drop_tuned
from orchestrator.shapes.model import Shape
from orchestrator.tables import merge as merge_module
from orchestrator.tables.merge import merge
from orchestrator.tables.table import read_table
from tests.kits.results import A8W8
from tests.paths import ROOT
from tests.support.marks import drawn

HEADER = "gfx,cu_num,M,N,K,libtype,kernelId,splitK,us,kernelName,tflops,bw,errRatio"


def new(m: int, us: Any, name: str = "new", **fields: Any) -> dict[str, Any]:
    row = {"gfx": "gfx950", "cu_num": 256, "M": m, "N": 64, "K": 128, "libtype": "ck", "kernelId": 3, "splitK": 0}
    return {**row, "us": us, "kernelName": name, "tflops": 1.5, "bw": 20.25, "errRatio": 0.0, **fields}


def table(folder: Path, *lines: str, header: str = HEADER, end: str = "\n", last: bool = True) -> Path:
    path = folder / "db.csv"
    path.write_bytes((end.join((header, *lines)) + (end if last else "")).encode())
    return path


def line(m: int, us: str, gfx: str = "gfx950", name: str = "old") -> str:
    return f"{gfx},256,{m},64,128,ck, 1 ,0,{us},{name},0.10,20.00,0.0"


def test_the_incumbent_goes_only_if_clearly_beaten(tmp_path: Path) -> None:
    path = table(tmp_path, line(1, "100.0"), line(2, "100.0"), line(3, "100.0"), line(4, "Null"), line(5, "100.0"))
    report = merge(
        [new(1, 96.9), new(2, 97.1), new(3, 130.0), new(4, 9.5), new(5, 90.0, spread=0.12), new(6, 1.0)], path, A8W8
    )
    assert [(r.key["M"], r.action, r.why) for r in report.rows] == [
        (1, "replaced", "faster by 3.1%"),
        (2, "kept", "faster by 2.9%, which is not more than the margin of 3.0%"),
        (3, "kept", "slower by 30.0%"),
        (4, "replaced", "the old row had no time"),
        (5, "kept", "faster by 10.0%, which is not more than its own spread of 12.0%"),
        (6, "added", "the table had no row of this key"),
    ]
    lines = path.read_text().splitlines()
    assert [x.split(",")[8] for x in lines[1:]] == ["96.9", "100.0", "100.0", "9.5", "100.0", "1.0"]
    assert lines[2] == line(2, "100.0")
    assert report.to_json()["counts"] == {"added": 1, "replaced": 2, "kept": 3, "rejected": 0}


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last", [True, False], ids=["newline at the end", "none"])
def test_header_column_order_line_ends_and_untouched_rows_stay(tmp_path: Path, end: str, last: bool) -> None:
    header = "kernelName, us ,K,N,M,cu_num,gfx,note"
    mine = '"a ""name"", quoted",50.0,128,64,9, 256 ,gfx950,"two\nlines"'
    path = table(tmp_path, mine, "", "k,10.0,128,64,1,256,gfx950,", header="\ufeff" + header, end=end, last=last)
    merge([new(2, 5.0), new(1, 5.0)], path, A8W8)
    expected = ["\ufeff" + header, "new,5.0,128,64,1,256,gfx950,", "new,5.0,128,64,2,256,gfx950,", mine, ""]
    assert path.read_bytes().decode() == end.join(expected)
    assert [r.key[2] for r in read_table(path, A8W8).rows] == [1, 2, 9]


@pytest.mark.parametrize("linked", [False, True])
def test_the_old_file_is_kept_under_a_name_of_its_own(tmp_path: Path, linked: bool) -> None:
    path = table(tmp_path, line(1, "100.0"))
    path.chmod(0o640)
    if linked:
        (path := tmp_path / "link.csv").symlink_to("db.csv")
    seen = [path.read_bytes()]
    reports = []
    for us in (50.0, 25.0, 12.0):
        reports.append(merge([new(1, us)], path, A8W8))
        seen.append(path.read_bytes())
    backups = [Path(r.backup or "") for r in reports]
    assert len(set(backups)) == 3
    assert [b.read_bytes() for b in backups] == seen[:3]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert path.is_symlink() == linked


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (new(1, 0), "its us is 0"),
        (new(1, 5.0, errRatio=0.06), "its errRatio is 0.06, the limit 0.05"),
        (new(1, 5.0, "=cmd"), "its kernelName is a formula to a spreadsheet: '=cmd'"),
        (new(1, 5.0, libtype="@SUM(A1)"), "its libtype is a formula to a spreadsheet: '@SUM(A1)'"),
        (new(1, 5.0, "k\x1b[2J"), "its kernelName holds control characters: 'k\\x1b[2J'"),
        (new(1, 5.0, "k\u202e"), "its kernelName holds control characters: 'k\\u202e'"),
        (new(1, 5.0, K="many"), "K is 'many', not a whole number"),
        (new(1, 5.0, gfx="", cu_num=7), "it names no gfx, and none follows from cu_num 7"),
    ],
)
def test_what_cannot_be_a_row_is_rejected_with_its_reason(tmp_path: Path, row: dict[str, Any], why: str) -> None:
    report = merge([row, new(2, 5.0)], table(tmp_path, line(9, "100.0")), A8W8, err_ratio=0.05)
    assert [r.why for r in report.rows if r.action == "rejected"] == [why]
    assert report.count("added") == 1


def test_rows_of_other_chips_and_tags_are_other_keys(tmp_path: Path) -> None:
    path = table(tmp_path, line(1, "100.0") + ",", line(1, "9.0") + ",mtp", header=HEADER + ",_tag")
    report = merge([new(1, 5.0, gfx="gfx942", cu_num=304), new(1, 5.0, cu_num=128), new(1, 50.0)], path, A8W8)
    assert [(r.action, r.key["gfx"], r.key["cu_num"]) for r in report.rows] == [
        ("added", "gfx942", 304), ("added", "gfx950", 128), ("replaced", "gfx950", 256),
    ]  # fmt: skip
    lines = path.read_text().splitlines()
    assert [x.split(",")[:2] for x in lines[1:]] == [["gfx942", "304"], ["gfx950", "128"], *[["gfx950", "256"]] * 2]
    assert [x.split(",")[8] for x in lines[1:]] == ["5.0", "5.0", "50.0", "9.0"]
    assert lines[4] == line(1, "9.0") + ",mtp"


def test_a_table_without_gfx_takes_only_what_its_cu_num_says(tmp_path: Path) -> None:
    old = line(1, "100.0").removeprefix("gfx950,")
    path = table(tmp_path, old, header=HEADER.removeprefix("gfx,"))
    report = merge([new(1, 5.0), new(2, 6.0)], path, A8W8)
    assert [r.action for r in report.rows] == ["replaced", "added"]
    assert "taken as gfx950" in report.notes[0]
    assert path.read_text().splitlines()[1] == "256,1,64,128,ck,3,0,5.0,new,1.5,20.25,0.0"
    before = path.read_bytes()
    with pytest.raises(TunedDBError, match=r"no gfx column.*gfx1100 with cu_num 96"):
        merge([new(3, 5.0, gfx="gfx1100", cu_num=96)], path, A8W8)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "faults"),
    [
        (f"{HEADER}\n{line(1, '5')}\n{line(1, '6')}\n", ["db.csv:3: has the same key as line 2: gfx950,256,1,64,128"]),
        (f"{HEADER}\n{line(1, '5')}\ngfx950,256,2\n", ["db.csv:3: has 3 cells, the header 13; was a write cut short"]),
        (
            f"{HEADER}\n{line(1, 'fast')}\n{line(2, '5').replace(',128,', ',x,')}\n",
            ["db.csv:2: us is 'fast'", "db.csv:3: K is 'x'"],
        ),
        (f"{HEADER},us\n", ["db.csv:1: column us is there 2 times"]),
        ("M,N,K\n1,2,3\n", ["db.csv:1: is not a tuned table of a8w8_blockscale: column cu_num, us is missing"]),
        (f'{HEADER}\n"{line(1, "5")}', ["db.csv:2: is not a CSV line"]),
        (f"{HEADER}\n\xff\xfe\n", ["db.csv:2: holds bytes that are not UTF-8"]),
        (f"{HEADER}\n\0\n", ["db.csv:2: holds a NUL byte"]),
    ],
)
def test_a_table_that_cannot_be_trusted_is_left_alone_and_its_faults_are_named(
    tmp_path: Path, content: str, faults: list[str]
) -> None:
    path = tmp_path / "db.csv"
    path.write_bytes(content.encode("latin-1"))
    before = path.read_bytes()
    with pytest.raises(TunedDBError) as e:
        merge([new(1, 5.0)], path, A8W8)
    assert all(f in fault for f, fault in zip(faults, e.value.faults, strict=True)), e.value.faults
    assert path.read_bytes() == before
    assert not list(tmp_path.glob("*.bak"))


def test_somebody_elses_change_during_the_merge_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = table(tmp_path, line(1, "100.0"))
    theirs = path.read_text() + line(7, "7.0") + "\n"

    def edit(*args: Any) -> Any:
        path.write_text(theirs)
        return parts(*args)

    parts = merge_module._lines_by_place
    monkeypatch.setattr(merge_module, "_lines_by_place", edit)
    with pytest.raises(TunedDBError, match="changed by another process"):
        merge([new(1, 5.0)], path, A8W8)
    assert path.read_text() == theirs


def test_two_merges_at_once_take_turns_and_one_that_waits_too_long_says_so(tmp_path: Path) -> None:
    path = tmp_path / "db.csv"
    rows = [[new(100 * k + m, 5.0) for m in range(20)] for k in range(1, 7)]
    threads = [threading.Thread(target=merge, args=(some, path, A8W8)) for some in rows]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(read_table(path, A8W8).rows) == 120
    with (tmp_path / ".db.csv.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(TunedDBError, match="another merge is writing"):
            merge([new(1, 5.0)], path, A8W8, lock_wait_s=0.05)


def test_processes_that_remove_the_lock_file_never_hold_it_at_once(tmp_path: Path) -> None:
    counter = tmp_path / "counter"
    counter.write_text("0")
    code = """
import sys
from pathlib import Path
from orchestrator.files.lock import locked
counter = Path(sys.argv[1])
for _ in range(100):
    with locked(counter, wait_s=600):
        number = int(counter.read_text())
        counter.write_text(str(number + 1))
"""
    children = [subprocess.Popen([sys.executable, "-c", code, counter], cwd=ROOT) for _ in range(4)]
    assert [child.wait() for child in children] == [0] * 4
    assert counter.read_text() == "400"
    assert list(tmp_path.iterdir()) == [counter]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be two users")
@pytest.mark.parametrize(
    ("mode", "fault"), [(None, ""), (0o666, ""), (0o644, ""), (0o600, "its owner (uid 0) can run: chmod 666 ")]
)
def test_two_users_take_turns_in_a_shared_folder(mode: int | None, fault: str) -> None:
    """The first user's umask and his mode of the lock file do not shut the second one out, or a message says how."""
    with tempfile.TemporaryDirectory() as name:
        folder, was = Path(name), os.umask(0o077)
        try:
            folder.chmod(0o1777)
            path = folder / "db.csv"
            merge([new(1, 5.0)], path, A8W8)
            path.chmod(0o644)
            folder.chmod(0o777)
            lock = folder / ".db.csv.lock"
            if mode is not None:  # of a merge that was killed
                lock.touch()
                lock.chmod(mode)
            os.seteuid(65534)
            if fault:
                with pytest.raises(TunedDBError, match=re.escape(f"{lock}: this lock file cannot be used")) as refused:
                    merge([new(2, 5.0)], path, A8W8)
                assert fault + str(lock) in str(refused.value)
            else:
                assert merge([new(2, 5.0)], path, A8W8).count("added") == 1
        finally:
            os.seteuid(0)
            os.umask(was)


def test_a_lock_file_that_was_left_is_opened_for_all_and_what_is_none_is_refused_by_name(tmp_path: Path) -> None:
    path, lock = table(tmp_path, line(1, "100.0")), tmp_path / ".db.csv.lock"
    lock.touch(0o644)
    with locked(path):
        assert stat.S_IMODE(lock.stat().st_mode) == 0o666
    assert not lock.exists()
    makers: dict[str, Callable[[], None]] = {
        "symbolic link": lambda: lock.symlink_to(tmp_path / "elsewhere"),
        "not a regular file": lambda: os.mkfifo(lock),
        "Is a directory": lock.mkdir,
    }
    for fault, make in makers.items():
        make()
        with pytest.raises(TunedDBError, match=f"{re.escape(str(lock))}: .*{fault}"):
            merge([new(1, 5.0)], path, A8W8)
        (lock.rmdir if lock.is_dir() else lock.unlink)()
    assert not (tmp_path / "elsewhere").exists()


# `sort_keys` of AITER's tuners at e4048607a5 (base_tuner.py:1565, opus_bmm_mxscale_tune.py:280)
SORT_KEYS = {
    "a8w8": ("gfx", "cu_num", "N", "M", "K", "q_dtype_w"),
    "batched_bf16": ("gfx", "cu_num", "B", "N", "M", "K"),
    "batched_gemm_a8w8_blockscale_mxscale": ("gfx", "B", "N", "M", "K"),
}


@pytest.mark.parametrize("name", SORT_KEYS)
def test_rows_are_in_the_order_in_which_aiters_tuners_leave_them(tmp_path: Path, name: str) -> None:
    family, rng = get_family(name), random.Random(name)
    chips = [("gfx950", 256), ("gfx950", 80), ("gfx1250", 256), ("gfx942", 304)]
    sizes = itertools.product(chips, (8, 16, 128), (9, 64), (32, 256), (1, 2), ("torch.int8", "torch.float8_e4m3fn"))
    rows = {
        tuple(row[n] for n in SORT_KEYS[name]): row
        for (gfx, cu_num), m, n, k, b, dtype in sizes
        for row in (new(m, 5.0, gfx=gfx, cu_num=cu_num, N=n, K=k, B=b, q_dtype_w=dtype),)
    }
    orders, texts = [rng.sample(sorted(rows), len(rows)) for _ in range(2)], list[str]()
    for keys in orders:
        path = tmp_path / f"{len(texts)}.csv"
        for some in (keys[::3], keys[1::3], keys[2::3]):
            assert not merge([rows[k] for k in some], path, family).notes
        texts.append(path.read_text())
        header, *lines = texts[-1].splitlines()
        cells = [dict(zip(family.from_aiter(header.split(",")), x.split(","), strict=True)) for x in lines]
        assert [{n: c[n] for n in SORT_KEYS[name]} for c in cells] == [
            {n: str(v) for n, v in zip(SORT_KEYS[name], key, strict=True)} for key in sorted(rows)
        ]
    assert texts[0] == texts[1]


def test_a_table_in_another_order_is_sorted_by_its_first_change_and_the_merge_says_so(tmp_path: Path) -> None:
    path, said = table(tmp_path, line(9, "5.0"), line(2, "5.0")), "were in another order than AITER's tuners"
    before = path.read_bytes()
    assert not merge([new(2, 5.0)], path, A8W8).notes
    assert said in merge([new(2, 1.0)], path, A8W8, dry_run=True).notes[0]
    assert path.read_bytes() == before
    assert said in merge([new(2, 1.0)], path, A8W8).notes[0]
    assert [r.key[2] for r in read_table(path, A8W8).rows] == [2, 9]
    assert not merge([new(3, 1.0)], path, A8W8).notes


def test_rows_of_fmoe_keep_their_places_as_its_tuner_does_not_sort(tmp_path: Path) -> None:
    family, path = get_family("fmoe"), tmp_path / "tuned_fmoe.csv"
    key = {c.name: c.default or 64 for c in family.columns}
    rows = [{**new(1, 5.0), **key, "token": token, "kernelName1": "moe_ck2stages_a"} for token in (64, 8, 512, 1)]
    for row in rows:
        merge([row], path, family)
    assert not merge([{**rows[1], "us": 1.0}], path, family).notes
    assert [(r.key[2], r.us) for r in read_table(path, family).rows] == [(64, 5.0), (8, 1.0), (512, 5.0), (1, 5.0)]


def test_a_table_without_gfx_is_sorted_by_cu_num_and_not_by_the_gfx_that_follows(tmp_path: Path) -> None:
    rows = [f"{cu_num},1,64,128,ck,1,0,9.0,old,1.0,20.0,0.0" for cu_num in (304, 256, 80)]
    path = table(tmp_path, *rows, header=HEADER.removeprefix("gfx,"))
    merge([new(2, 5.0)], path, A8W8)
    assert [r.key[1:3] for r in read_table(path, A8W8).rows] == [(80, 1), (256, 1), (256, 2), (304, 1)]


drawn_row = st.builds(
    new, m=st.integers(1, 4), us=st.sampled_from([5.0, 5.0, 4.99, 4.5, 100.0, 0.0, float("nan"), "Null"]),
    name=st.sampled_from(["a", "b"]), kernelId=st.integers(0, 2), cu_num=st.sampled_from([256, 128]),
    spread=st.sampled_from([None, 0.0, 0.2]),
)  # fmt: skip
incumbents = st.dictionaries(st.integers(1, 6), st.sampled_from(["5.0", "4.8", "1.0", "Null", "50"]), max_size=6)


@drawn(60)
@given(incumbents, st.lists(drawn_row, max_size=12))
def test_merge_twice_is_merge_once_and_untouched_rows_keep_their_bytes(
    old: dict[int, str], rows: list[dict[str, Any]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = table(Path(folder), *(line(m, us) for m, us in old.items()))
        before = path.read_text().splitlines()
        first = merge(rows, path, A8W8)
        once = path.read_bytes()
        second = merge(rows, path, A8W8)
        assert path.read_bytes() == once
        assert not second.changed
        after, there = once.decode().splitlines(), read_table(path, A8W8).rows
        touched = {r.key["M"] for r in first.rows if r.action == "replaced"}
        lines = {r.key[2]: after[r.line - 1] for r in there if r.key[1] == 256}
        assert [lines[m] for m in old if m not in touched] == [
            b for b, m in zip(before[1:], old, strict=True) if m not in touched
        ]
        keys = [r.key for r in there]
        assert keys == sorted(keys) if first.changed else after == before  # of one N and K
        assert len(keys) == len(set(keys)) == len(old) + first.count("added")


def test_a_family_whose_columns_aiter_calls_otherwise_and_which_has_no_cu_num(tmp_path: Path) -> None:
    family = get_family("batched_gemm_a8w8_blockscale_mxscale")
    path = tmp_path / f"dsv4_{family.tuned_csv}"
    rows = [new(m, 9.0, B=2, libtype="opus", tflops=2 * 2 * m * 64 * 128 / 9e6) for m in (1, 4)]
    assert merge(rows, path, family).count("added") == 2
    assert path.read_text().splitlines()[0] == "gfx,b,m,n,k,libtype,kernelId,splitK,us,kernelName,tflops,bw,errRatio"
    report = merge([{**rows[0], "us": 5.0}, {**rows[1], "us": 20.0, "cu_num": 128}], path, family)
    assert [(r.action, r.key["M"]) for r in report.rows] == [("replaced", 1), ("kept", 4)]
    shapes = [Shape(1, (2, 1, 64, 128)), Shape(2, (2, 8, 64, 128))]
    assert [s.id for s in drop_tuned(shapes, family, path, "gfx950", 128).todo] == [2]


def test_the_scratch_folder_of_a_killed_command_is_removed_by_the_next_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = (
        "import os, signal\nfrom orchestrator.files.scratch import scratch_folder\n"
        "with scratch_folder('s-') as folder:\n    (folder / 'f').touch()\n    os.kill(0, signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, start_new_session=True, check=False)
    (abandoned,) = tmp_path.iterdir()
    with scratch.scratch_folder("s-") as young:
        assert set(tmp_path.iterdir()) == {abandoned, young}, "it may be locked in a moment"
        monkeypatch.setattr(scratch, "YOUNG_S", 0.0)
        with scratch.scratch_folder("s-") as folder:
            assert set(tmp_path.iterdir()) == {young, folder}
    assert list(tmp_path.iterdir()) == []
