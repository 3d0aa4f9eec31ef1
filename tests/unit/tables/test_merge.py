"""`db merge`: who wins by which figure, in whatever order newcomers come; provenance, mixing, undo, bad files."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from orchestrator.errors import TunedDBError
from orchestrator.tables.decision import MergePolicy, Time, decide
from orchestrator.tables.merge import MergeReport, merge, undo
from orchestrator.tables.merge_input import open_sources
from orchestrator.tables.newcomers import MergeRow, Newcomer
from orchestrator.tables.provenance import read_records, records_path
from tests.kits.fleet import command
from tests.kits.results import A8W8
from tests.paths import ROOT
from tests.support.marks import drawn
from tests.unit.tables.test_table import HEADER, line, new, table

PROFILE = HEADER + ",attempt,node,slot,status,spread,samples,winner,detail"


def csv(path: Path, *lines: str, header: str = HEADER) -> Path:
    path.write_text("\n".join((header, *lines)) + "\n")
    return path


def profiled(m: int, us: str, name: str, *, attempt: str = "a1", spread: str = "", winner: int = 0) -> str:
    return f"{line(m, us, name=name)},{attempt},n1,0,ok,{spread},9,{winner},"


def merged(into: Path, *news: Path, profile: tuple[Path, ...] = ()) -> MergeReport:
    s = open_sources(list(news), list(profile), into, A8W8.name)
    return merge(s.newcomers(), into, s.family, profile=s.beside(), facts=s.facts)


@pytest.mark.parametrize(
    ("old", "new_time", "rival", "policy", "action", "judged"),
    [
        # the figure in the table is 10 % slower, but the old kernel has gained as much: nothing is won
        (Time(100.0), Time(90.0), Time(90.5), "noise", "kept", "same profile"),
        # and the other way round: the session was slow, the old kernel slower still
        (Time(100.0), Time(105.0), Time(125.0), "noise", "replaced", "same profile"),
        (Time(100.0), Time(98.0), None, "noise", "kept", "old figure"),
        (Time(100.0), Time(96.0), None, "noise", "replaced", "old figure"),
        # within one session the spreads are the noise: 0.5 % and 0.5 % make 0.7 %
        (Time(100.0), Time(99.0, 0.005), Time(100.0, 0.005), "noise", "replaced", "same profile"),
        (Time(100.0), Time(99.4, 0.005), Time(100.0, 0.005), "noise", "kept", "same profile"),
        # where one of them is not known, 3 %; of two sessions never less
        (Time(100.0), Time(98.0, 0.001), Time(100.0), "noise", "kept", "same profile"),
        (Time(100.0, 0.001), Time(98.0, 0.001), None, "noise", "kept", "old figure"),
        (Time(100.0), Time(99.9), None, "best", "replaced", "old figure"),
        (Time(100.0), Time(100.0), None, "best", "kept", "old figure"),
        (Time(100.0), Time(120.0), None, "replace", "replaced", "old figure"),
        (None, Time(1e9), None, "noise", "replaced", "no old time"),
    ],
)
def test_the_judge(
    old: Time | None, new_time: Time, rival: Time | None, policy: MergePolicy, action: str, judged: str
) -> None:
    assert decide(old, new_time, is_key=True, rival=rival, policy=policy)[:2] == (action, judged)


def test_each_row_says_what_it_was_judged_by(tmp_path: Path) -> None:
    db = table(tmp_path, *(line(m, "100.0") for m in range(1, 7)))
    profile = csv(
        tmp_path / "p.csv",
        profiled(1, "80.0", "new", winner=1), profiled(1, "80.5", "old"),  # the old kernel has gained as much
        profiled(2, "80.0", "new", winner=1), profiled(2, "95.0", "old"),
        profiled(3, "80.0", "new", winner=1), profiled(3, "95.0", "old", attempt="a2"),  # not the same session
        profiled(4, "80.0", "old", winner=1), profiled(4, "81.0", "new"),
        header=PROFILE,
    )  # fmt: skip
    tuned = csv(tmp_path / "tuned.csv", line(5, "80.0", name="new"), line(6, "80.0", name="new"))
    beside = csv(  # as AITER writes them: no attempt; failed candidates with -1 and inf
        tmp_path / "beside.csv",
        line(5, "80.0", name="new"), line(5, "80.2"), line(5, "-1", name="x"), line(5, "inf", name="y"),
        line(6, "70.0", name="new"), line(6, "80.2"),  # another time than the table's: of another session
    )  # fmt: skip
    report = merged(db, profile, tuned, profile=(beside,))
    assert [(r.key["M"], r.action, r.judged, r.old_us, r.new_us, r.rival_us) for r in report.rows] == [
        (1, "kept", "same profile", 100.0, 80.0, 80.5),
        (2, "replaced", "same profile", 100.0, 80.0, 95.0),
        (3, "replaced", "old figure", 100.0, 80.0, None),
        (4, "kept", "same profile", 100.0, 80.0, 80.0),
        (5, "kept", "same profile", 100.0, 80.0, 80.2),
        (6, "replaced", "old figure", 100.0, 80.0, None),
    ]


drawn_row = st.tuples(
    st.integers(1, 4), st.sampled_from(["5.0", "4.99", "4.5", "4.2", "100.0", "-1", "inf"]),
    st.sampled_from(["old", "a", "b"]), st.sampled_from(["a1", "a2"]), st.sampled_from(["", "0.01", "0.2"]),
)  # fmt: skip
SEEN = [(1, "4.2", "a", "a1", ""), (1, "4.2", "a", "a1", "0.2"), (1, "5.0", "old", "a1", "")]


@drawn(60)
@example(SEEN, random.Random(1), 3)
@example([SEEN[1], SEEN[0], SEEN[2]], random.Random(0), 3)
@given(st.lists(drawn_row, min_size=1, max_size=14), st.randoms(use_true_random=False), st.integers(1, 3))
def test_any_order_and_any_split_give_the_same_table(
    rows: list[tuple[int, str, str, str, str]], rng: Any, files: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = [profiled(m, us, kernel, attempt=a, spread=s) for m, us, kernel, a, s in rows]
        out = []
        for turn in range(2):
            db = folder / f"db{turn}.csv"
            table(folder, line(1, "5.0"), line(2, "Null"), line(3, "4.6")).rename(db)
            parts = [lines[i::files] for i in range(files)] if turn else [lines]
            paths = [csv(folder / f"{turn}-{i}.csv", *part, header=PROFILE) for i, part in enumerate(parts)]
            report = merged(db, *paths)
            out.append((db.read_text(), [(r.action, r.judged, r.why, r.new_us) for r in report.rows]))
            rng.shuffle(lines)
        assert out[0] == out[1]


def of(image: str, tuner: str = "aiter 1") -> Callable[[Newcomer], dict[str, Any]]:
    return lambda row: {"image": image, "tuner": tuner, "node": "n1", "spread": row.spread, "flags": {"splitK": True}}


def test_records_follow_their_rows(tmp_path: Path) -> None:
    db = tmp_path / "db.csv"
    merge([new(1, 10.0), new(2, 10.0)], db, A8W8, facts=of("sha256:a"))
    merge([new(1, 5.0), new(3, 7.0, 'a "name" \\ é')], db, A8W8, facts=of("sha256:a"))
    path = records_path(db)
    documents = [json.loads(x) for x in path.read_text().splitlines()]
    assert [(d["key"], d["us"], d["kernel"], d["node"]) for d in documents] == [
        ("gfx950,256,1,64,128", 5.0, "new", "n1"),
        ("gfx950,256,2,64,128", 10.0, "new", "n1"),
        ("gfx950,256,3,64,128", 7.0, 'a "name" \\ é', "n1"),
    ]
    path.write_text("\n" + "".join(json.dumps(dict(reversed(d.items()))) + "\n" for d in documents))
    assert [r.document for r in read_records(db).values()] == documents, "in another order of its fields"
    db.write_text(db.read_text().replace(",10.0,", ",11.0,"))
    report = merge([new(9, 1.0)], db, A8W8, facts=of("sha256:a"))
    assert any("1 record without a row" in n for n in report.notes)
    done = command("db", "check", db, "--family", A8W8.name, "--json")
    assert done.json()["tables"][0]["provenance"] == {"known": 3, "stale": 1, "unknown": 1}
    path.write_text(path.read_text() + '{"key": "gfx95')
    before = db.read_bytes()
    with pytest.raises(TunedDBError, match=r"db.csv.provenance.jsonl:5: is not a record"):
        merge([new(1, 1.0)], db, A8W8)
    assert db.read_bytes() == before


def test_images_and_tuner_versions_that_are_known_do_not_mix_silently(tmp_path: Path) -> None:
    db = tmp_path / "db.csv"
    merge([new(1, 10.0), new(2, 10.0)], db, A8W8, facts=of("sha256:a"))
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(TunedDBError) as e:
        merge([new(1, 5.0)], db, A8W8, facts=of("sha256:b", "aiter 2"))
    assert "images would mix on gfx950 with cu_num 256" in e.value.faults[0]
    assert "aiter 1, the newcomers of aiter 2" in e.value.faults[1]
    assert e.value.faults[2] == "merge into a table of their own, or give --allow-mixed to `db merge`"
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    with pytest.raises(TunedDBError) as e:  # a table of their own would mix, too
        merge([new(1, 5.0), new(2, 5.0)], db, A8W8, facts=lambda row: of(f"sha256:{row.cells['M']}")(row))
    assert e.value.faults[-1] == "give --allow-mixed to `db merge`"
    # another chip, a newcomer that does not win, and rows that go altogether mix with nothing
    assert merge([new(1, 5.0, cu_num=128)], db, A8W8, facts=of("sha256:b")).count("added") == 1
    assert not merge([new(1, 9.9)], db, A8W8, facts=of("sha256:b")).changed
    assert merge([new(1, 5.0), new(2, 5.0)], db, A8W8, facts=of("sha256:c")).count("replaced") == 2
    report = merge([new(1, 2.0)], db, A8W8, facts=of("sha256:d"), allow_mixed=True)
    assert report.count("replaced") == 1
    assert any("would mix" in n for n in report.notes)


def test_it_is_noted_that_an_image_is_not_known_only_where_another_is(tmp_path: Path) -> None:
    def notes(name: str, facts: Callable[[Newcomer], dict[str, Any]]) -> list[str]:
        report = merge([new(1, 10.0)], tmp_path / f"{name}.csv", A8W8, facts=facts)
        merged = merge([new(2, 10.0)], tmp_path / f"{name}.csv", A8W8, facts=of("sha256:a"))
        return [note.split(": ")[1] for note in (*report.notes, *merged.notes) if "taken on trust" in note]

    assert notes("none", of("")) == ["the image of 1 of 1 old row is not known"]
    assert notes("all", of("sha256:a")) == []


def state(db: Path) -> tuple[bytes, bytes | None]:
    beside = records_path(db)
    return db.read_bytes(), beside.read_bytes() if beside.exists() else None


def test_a_dry_run_shows_what_would_change_and_writes_nothing(tmp_path: Path) -> None:
    db, more = table(tmp_path, line(1, "100.0")), csv(tmp_path / "new.csv", line(1, "50.0"), line(2, "7.0"))
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    for into, counts in ((db, "1 added, 1 replaced"), (tmp_path / "none.csv", "2 added")):
        done = command("db", "merge", more, "--into", into, "--family", A8W8.name, "--dry-run").ok()
        assert f"{into}: {counts} (noise); nothing was written (--dry-run)" in done.out
        assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_merges_are_undone_one_after_another_byte_for_byte(tmp_path: Path) -> None:
    db = table(tmp_path, line(1, "100.0"), end="\r\n")
    states = [state(db)]
    for us in (50.0, 25.0, 12.0):
        merge([new(1, us), new(int(us), us)], db, A8W8, facts=of("sha256:a"))
        states.append(state(db))
    for left, expected in reversed([*enumerate(states[:-1])]):
        done = command("db", "undo", db, "--json").json()
        assert state(db) == expected
        assert Path(done["aside"]).read_bytes() == states[left + 1][0]
        assert (done["left"], done["records"]) == (left, "restored" if left else "removed")
    for path in (db, tmp_path / "none.csv"):
        command("db", "undo", path).failed_with(2)
    assert not list(tmp_path.glob("*.bak"))


def test_the_number_of_a_kept_state_counts_and_not_the_clock_in_its_name(tmp_path: Path) -> None:
    db = table(tmp_path, line(1, "100.0"))
    for name, us in (("20990101T000000Z", "102.0"), ("20990101T000000Z-2", "101.0"), ("20260101T000000Z", "103.0")):
        csv(tmp_path / f"db.csv.{name}.bak", line(1, us))  # as 0.3 kept them
    states = [state(db)[0]]
    for figure, clock in ((50.0, "20980101T000000Z"), (25.0, "20260101T000000Z")):
        kept = Path(merge([new(1, figure)], db, A8W8).backup or "")
        _, number, _ = kept.name.removeprefix(db.name).split(".", 2)
        kept.rename(kept.with_name(f"{db.name}.{number}.{clock}.bak"))
        states.append(state(db)[0])
    undone = [(undo(db), db.read_bytes())[1] for _ in range(5)]
    assert undone[:2] == states[1::-1]
    assert [text.splitlines()[1].decode() for text in undone[2:]] == [line(1, us) for us in ("101.0", "102.0", "103.0")]


@pytest.mark.parametrize("had_records", [False, True])
@pytest.mark.parametrize("fatal", ["rename 1", "rename 2", "link 1"])
def test_the_next_command_takes_back_a_merge_that_was_killed(tmp_path: Path, had_records: bool, fatal: str) -> None:
    db = table(tmp_path, line(1, "100.0"))
    if had_records:
        merge([new(1, 90.0)], db, A8W8, facts=of("sha256:a"))
    old, names = state(db), {p.name for p in tmp_path.iterdir()}
    call, number = fatal.split()
    killed = f"""
import os, signal, sys
from pathlib import Path
from orchestrator.tables.merge import merge
from tests.unit.tables.test_merge import A8W8, new, of
calls, real = [], os.{call}
def dies(*args, **more):
    calls.append(args)
    if len(calls) == {number}:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args, **more)
os.{call} = dies
merge([new(1, 50.0)], Path(sys.argv[1]), A8W8, facts=of("sha256:a"))
"""
    done = subprocess.run([sys.executable, "-c", killed, db], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    assert db.read_bytes() == old[0]
    merge([new(1, 200.0)], db, A8W8, facts=of("sha256:a"))  # it is slower: nothing is written
    assert (state(db), {p.name for p in tmp_path.iterdir()}) == (old, names)


def test_a_file_that_a_living_process_writes_stays(tmp_path: Path) -> None:
    db = table(tmp_path, line(1, "100.0"))
    living, foreign = tmp_path / f".db.csv.{os.getppid()}.tmp", tmp_path / ".db.csv.x.tmp"
    dead = [tmp_path / f".db.csv.{pid}.tmp" for pid in (2**22 + 1, 10**30)]
    locked_elsewhere = tmp_path / f".db.csv.{2**22 + 2}.tmp"
    for path in (living, foreign, locked_elsewhere, *dead):
        path.touch()
    with locked_elsewhere.open() as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        merge([new(1, 50.0)], db, A8W8)
    assert set(tmp_path.glob(".*.tmp")) == {living, foreign, locked_elsewhere}


@pytest.mark.parametrize("step", range(1, 8))
def test_a_merge_that_is_cut_off_leaves_an_old_or_a_new_table_whole(
    tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C, or a full disk, at every step that touches the disk."""
    db = table(tmp_path, line(1, "100.0"))
    merge([new(1, 90.0)], db, A8W8, facts=of("sha256:a"))
    old, kept = state(db), set(tmp_path.glob("*.bak"))
    count = itertools.count(1)
    wrong: BaseException = KeyboardInterrupt() if step % 2 else OSError(28, "No space left on device")
    for name in ("rename", "fsync"):
        real = getattr(os, name)

        def fails(*args: Any, real: Any = real, **more: Any) -> Any:
            if next(count) == step:
                raise wrong
            return real(*args, **more)

        monkeypatch.setattr(os, name, fails)
    with contextlib.suppress(KeyboardInterrupt, TunedDBError):
        merge([new(1, 50.0)], db, A8W8, facts=of("sha256:a"))
    monkeypatch.undo()
    assert not list(tmp_path.glob(".*.tmp"))
    if b"50.0" in db.read_bytes():
        undo(db)
    assert state(db) == old
    assert set(tmp_path.glob("*.bak")) == kept


def test_short_rows_of_aiters_are_filled_up_as_it_does(tmp_path: Path) -> None:
    rows = [line(1, "5.0").rsplit(",", 2)[0], line(2, "5.0")]
    s = open_sources([csv(tmp_path / "new.csv", *rows)], [], None, A8W8.name)
    assert [r["kernelName"] for r in s.newcomers()] == ["old", "old"]
    assert "filled up 1 row short of cells" in s.notes[-1]
    (tmp_path / "new.csv").write_text("\n".join([HEADER, *reversed(rows)]))
    with pytest.raises(TunedDBError, match=r"new.csv:3: has 11 cells"):  # cut off in its last line
        list(s.newcomers())


def test_a_table_of_another_family_and_a_folder_that_is_no_run_are_refused(tmp_path: Path) -> None:
    db = csv(tmp_path / "a4w4_blockscale_tuned_gemm.csv", header=HEADER.replace("libtype,", ""))
    done = command("db", "merge", csv(tmp_path / "a8w8_blockscale_tuned_gemm.csv", line(1, "5.0")), "--into", db)
    done.failed_with(2, "tables of several families do not merge")
    command("db", "merge", tmp_path, "--into", db).failed_with(2, "holds no tuned.csv")
    command("db", "merge", "20261129-0a1b", "--into", db).failed_with(2, "here, such as runs/20261129-0a1b")


def test_a_line_of_a_merge_has_the_two_times_that_its_reason_compares() -> None:
    why = "slower by 60.0% in the same profile"
    row = MergeRow("kept", {}, 13951.1, 18389.1, "old", "new", why, "same profile", 11493.2)
    assert row.times == "11493.2 us -> 18389.1 us"
    assert replace(row, new_kernel="old").times == "18389.1 us"
    assert replace(row, judged="old figure").times == "13951.1 us -> 18389.1 us"
    assert MergeRow("added", {}, None, 2.5, "", "new", "", "new key").times == "2.5 us"
