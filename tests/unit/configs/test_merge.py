"""Winners of a run: written from its rows, merged into a tree so that no other M moves, proven, undone."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.configs import aiter_tree as merging
from orchestrator.configs.aiter_trial import LoaderArguments, LookupTrial, run_trial
from orchestrator.configs.decisions import DOCUMENT_FIELD, decide_winners
from orchestrator.configs.default_readers import RECHECK_LIST
from orchestrator.configs.journal import MergeJournal, undo_merge
from orchestrator.configs.merge import merge_run
from orchestrator.configs.winners import AITER_FOLDER, TABLE, read_winners, write_winners
from orchestrator.errors import InputError, TunedDBError
from orchestrator.families import get_family
from orchestrator.shapes.model import Shape
from orchestrator.tables.merge_input import open_sources
from orchestrator.tables.mixing import check_db
from tests.kits.results import Run, ended, started
from tests.kits.results import row as said
from tests.standins.aiter.config_files import operator, resolved, text_of, tree, values, winners
from worker.triton_configs.config_file import parse_config_file
from worker.triton_configs.resolve import CONFIGS, TRITON, bucket_for
from worker.triton_configs.tree_files import place_winners

NAME = "gemmfleet-merges.jsonl"
OWN = "gfx950-GEMM-A16W16-N=512-K=1024.json"
QUANT, CAT = "fused_gemm_a16w16_quant_x", "fused_gemm_a16w16_split_cat"
"""A fused operator that the tuner can call, and one of which nobody here knows its operands."""
DEFAULT = "gemm/gfx950-GEMM-A16W16.json"
BOUNDS = (16, 64, 256, 512)
BUCKETS = [*(f"M_LEQ_{x}" for x in BOUNDS), *(f"M_GEQ_{x}" for x in BOUNDS)]
SHIPPED = {"_note": "by hand", "M_LEQ_64": values(32), "M_LEQ_256": values(64), "any": values(128)}
WON = {OWN: {"M_LEQ_64": values(16)}}
WON_DEFAULT = {"gfx950-GEMM-A16W16.json": {"M_LEQ_64": values(16)}}


@pytest.fixture(autouse=True)
def trials(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[LoaderArguments]]:
    """Lookups in place of a trial, which needs Triton."""
    asked: list[Sequence[LoaderArguments]] = []

    def trial(root: Path, arch: str, calls: Sequence[LoaderArguments], *, alone: bool) -> LookupTrial:
        asked.append(calls)
        return resolved(root, arch, calls)

    monkeypatch.setattr(merging, "run_trial", trial)
    return asked


@pytest.fixture
def root(tmp_path: Path) -> Path:
    files = {DEFAULT: SHIPPED, "gemm/gfx950-GEMM-A16W16-N=256-K=1024.json": {"any": values(1)}}
    return operator(tree(tmp_path / "tree", files), QUANT)


def refused(run: Path, root: Path, **options: Any) -> list[str]:
    """The faults of a merge that leaves the tree as it was."""
    before = text_of(root)
    with pytest.raises(InputError) as e:
        merge_run(run, root, **options)
    assert text_of(root) == before
    return e.value.faults


def test_a_new_file_holds_every_bucket_of_the_default_and_moves_no_other_m(
    root: Path, tmp_path: Path, trials: list[Sequence[LoaderArguments]]
) -> None:
    run = winners(tmp_path / "run", WON, [{}, {"M": 40, "count": 3}])
    done = merge_run(run, root)
    files = text_of(root)
    assert list(parse_config_file(files[f"gemm/{OWN}"]).document.items()) == [
        ("M_LEQ_16", values(32)), ("M_LEQ_64", values(16)), ("M_LEQ_256", values(64)), ("any", values(128)),
    ]  # fmt: skip
    assert files[f"gemm/{OWN}"].startswith('{\n  "M_LEQ_16": {\n    "BLOCK_SIZE_M"')  # the default's indent
    assert [(c.path.name, c.before, c.source.name, c.readers) for c in done.changes] == [
        (OWN, None, "gfx950-GEMM-A16W16.json", (QUANT,))
    ]
    now, after = trials
    assert now == after
    assert {(c["N"], c["K"]) for c in now} == {(512, 1024), (256, 1024), (513, 64)}
    assert {c["M"] for c in now} == {16, 17, 64, 65, 256, 257, 4096, 4097}
    again = merge_run(run, root)
    assert not again.changes
    assert "in the tree already" in again.notes[0]
    assert text_of(root) == files


@given(
    st.fixed_dictionaries({"any": st.just({"a": -1})}, optional={b: st.just({"a": i}) for i, b in enumerate(BUCKETS)}),
    st.sets(st.sampled_from([*BUCKETS[:4], "any"])),
)
def test_whatever_the_file_and_the_winners_no_other_m_moves(old: dict[str, Any], names: set[str]) -> None:
    won: dict[str, Any] = {n: {"a": 10 + i} for i, n in enumerate(sorted(names))}
    if bucket_for(old, 513, BOUNDS) != "any":
        won.pop("any", None)
    try:
        new = place_winners(old, won, BOUNDS)
    except ValueError:
        assert any(b.startswith("M_GEQ") for b in old)
        return
    for m in range(1, 600):
        mine = next((f"M_LEQ_{x}" for x in BOUNDS if m <= x), "any")
        assert new[bucket_for(new, m, BOUNDS)] == won.get(mine, old[bucket_for(old, m, BOUNDS)])


def test_the_commands_say_what_they_did(root: Path, tmp_path: Path) -> None:
    def said(*args: object) -> str:
        done = CliRunner().invoke(app, ["configs", *map(str, args)])
        assert done.exit_code == 0, done.output
        return done.output

    own = "gfx950-GEMM-A16W16-N=64-K=64.json"
    folder = winners(tmp_path / "run", {own: {"M_LEQ_64": values(16)}}, [{"N": 64, "K": 64}])
    text = said("merge", folder, "--into", root)
    for words in (
        f"configs/gemm/{own}: M_LEQ_64 (new; other buckets copied from gfx950-GEMM-A16W16.json)",
        f"read by {QUANT} as well",
        "proven by a stand-in: 24 lookups as planned, neighbours as before",
        f"configs undo {root} takes it back",
    ):
        assert words in text
    assert json.loads(said("undo", root, "--json"))["removed"] == [f"aiter/ops/triton/configs/gemm/{own}"]
    text = said("merge", folder, "--into", root, "--json")
    assert json.loads(text)["changes"][0]["buckets"] == ["M_LEQ_64"]
    assert said("undo", root).splitlines()[-1] == "  older merges left: 0"


@pytest.mark.parametrize(
    ("bucket", "config", "rows", "fault"),
    [
        ("M_LEQ_64", values(16), [{}, {"M": 40, "old_us": 10.0, "new_us": 10.6}],
         "M=40 N=512 K=1024 would become slower: 10 -> 10.6 us; M_LEQ_64 is left as it is"),
        ("M_LEQ_64", values(16), [{"old": values(64)}],
         "M=64 N=512 K=1024: the tree's M_LEQ_64 is another config than the one measured"),
        ("M_LEQ_64", values(16), [{"M": 40}], "M_LEQ_64: was not measured at M=64, its bound"),
        ("M_LEQ_64", values(16), [{}, {"M": 65, "old": values(64)}],
         "M=65 N=512 K=1024 does not resolve to M_LEQ_64 but to M_LEQ_256"),
        ("M_LEQ_64", {**values(16, kpack=2)}, [{}], "kpack is not allowed on gfx950"),
        ("M_LEQ_64", {k: v for k, v in values(16).items() if k != "num_warps"}, [{}], "M_LEQ_64: lacks num_warps"),
        ("M_LEQ_31", values(16), [{"M": 31}], "never found"),
    ],
)  # fmt: skip
def test_a_winner_that_does_not_hold_is_refused(
    root: Path, tmp_path: Path, bucket: str, config: dict[str, Any], rows: list[dict[str, Any]], fault: str
) -> None:
    run = winners(tmp_path / "run", {OWN: {bucket: config}}, [{"bucket": bucket, **row} for row in rows])
    assert any(fault in f for f in refused(run, root))


def test_what_aiter_itself_reads_otherwise_is_refused_or_taken_back(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, first = winners(tmp_path / "run", WON, [{}]), list[LookupTrial]()

    def stale(root: Path, arch: str, calls: Sequence[LoaderArguments], *, alone: bool) -> LookupTrial:
        first.append(resolved(root, arch, calls))
        return first[0]

    monkeypatch.setattr(merging, "run_trial", stale)
    (fault,) = refused(run, root)
    assert "gives other values than planned, so the files were put back as they were: GEMM-A16W16 M=17 N=512" in fault
    monkeypatch.setattr(
        merging, "run_trial", lambda root, arch, calls, alone: LookupTrial(tuple({} for _ in calls), "x")
    )
    (fault,) = refused(run, root)
    assert "reads this tree in another way than gemmfleet, and nothing was written" in fault
    monkeypatch.setattr(merging, "run_trial", lambda *_, **__: LookupTrial(why_not="no triton"))
    done = merge_run(run, root)
    assert (done.proof, done.notes) == ("", ["proven by gemmfleet's own reading only: no triton"])


@pytest.mark.parametrize(
    "row",
    [
        {"kind": "fmoe"}, {"bucket": "M_64"}, {"shape": [None, "x", 1024]}, {"shape": [None, 0, 1024]}, {"values": 1},
        {"shape": [512, 1024]}, {"points": [[64, 1]]},
        {"points": [[64, 1, 20.0, -1, 0.0, 0, ""]]}, {"points": [[64, 1, 0.0, 15.0, 0.0, 0, ""]]},
        {"points": [[0.5, 1, "fast", 15.0, 0.0, 0, ""]]}, {"bucket": "any", "arch": "../x"},
    ],
)  # fmt: skip
def test_a_row_that_is_none(row: dict[str, Any], tmp_path: Path) -> None:
    run = winners(tmp_path / "run", WON, [{}, {"M": 40}])
    table = run / AITER_FOLDER / TABLE
    *head, cell = list(csv.reader(table.read_text().splitlines()))[-1]
    lines = table.read_text().splitlines()[:-1]
    text = io.StringIO()
    csv.writer(text).writerow([*head, json.dumps({**json.loads(cell), **row})])
    table.write_text("\n".join([*lines, text.getvalue()]))
    with pytest.raises(InputError) as e:
        read_winners(run)
    assert e.value.faults == [f"{table}:3: does not end with the document of a winner"]


def test_a_trial_without_a_package_says_so(root: Path) -> None:
    pytest.importorskip("triton")
    (root / TRITON / "utils" / "gemm_config_utils.py").write_text("import no_such_package\n")
    why_not = run_trial(root, "gfx950", []).why_not
    assert why_not.endswith("No module named 'no_such_package'; pip install '.[triton]' in a checkout of gemmfleet")


def test_a_run_without_winners_and_a_folder_without_configs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no tuned\.csv in configs/aiter, configs/vllm or configs/sglang"):
        merge_run(tmp_path, tmp_path)
    with pytest.raises(InputError, match="has no row"):
        read_winners(winners(tmp_path / "run", WON, []))
    with pytest.raises(InputError, match="has no Triton configs of AITER"):
        merge_run(winners(tmp_path / "other", WON, [{}]), tmp_path)


def test_the_default_changes_on_request_and_every_reader_is_measured_again_first(root: Path, tmp_path: Path) -> None:
    configs, mine = root / "aiter" / "configs", tmp_path / "mine.csv"
    (configs / "model_configs").mkdir(parents=True)
    rows = "gfx950,256,33,512,1024,1\ngfx950,256,64,256,1024,1\n"
    (configs / "bf16_tuned_gemm.csv").write_text(f"gfx,cu_num,M,N,K,us\n{rows}")
    (configs / "model_configs" / "bf16_untuned_gemm_x.csv").write_text("M,N,K\n64,768,128\n65,768,128\n")
    run = winners(tmp_path / "run", WON_DEFAULT, [{}])
    (fault,) = refused(run, root)
    assert "changes a default file, which every shape without a file of its own reads" in fault
    mine.write_text("M,N\n1,2\n")
    (fault,) = refused(run, root, default=True, lists=[mine])
    assert fault.endswith("lacks K: no list of shapes of a16w16")
    mine.write_text("M,N,K\n20,96,64\n")
    own, fused = refused(run, root, default=True, lists=[mine])
    # 64x256x1024 has a file of its own, M = 65 another bucket
    assert "3 shapes of 3 that read M_LEQ_64 through gemm_a16w16 not measured again: 20x96x64, 33x512x1024" in own
    path = run / AITER_FOLDER / RECHECK_LIST
    todo = f"tune {path} with the same -O default (6 measurements, old and new), then merge that run"
    assert own.endswith(todo)
    assert f"through {QUANT} not measured again" in fused
    assert f"{todo} (where it cannot run, a slot's log says why; --checked {QUANT}" in fused
    assert (run / AITER_FOLDER / RECHECK_LIST).read_text() == "M,N,K\n20,96,64\n33,512,1024\n64,768,128\n"
    shapes = [{"M": 64}, {"M": 33}, {"M": 64, "N": 768, "K": 128}, {"M": 20, "N": 96, "K": 64}]
    every = [{**s, "caller": c} for s in shapes for c in ("", QUANT)]
    harmful = winners(tmp_path / "harmful", WON_DEFAULT, [*every[:-1], {**every[-1], "new_us": 22.0}])
    (fault,) = refused(harmful, root, default=True, lists=[mine])
    assert f"M=20 N=96 K=64 in {QUANT} would become slower: 20 -> 22 us" in fault
    merge_run(winners(tmp_path / "all", WON_DEFAULT, every), root, default=True, lists=[mine])
    assert json.loads(text_of(root)[DEFAULT]) == SHIPPED | {"M_LEQ_16": values(32), "M_LEQ_64": values(16)}


def test_an_operator_that_the_tuner_cannot_call_is_the_users_to_check(root: Path, tmp_path: Path) -> None:
    operator(operator(root, CAT), "fused_gemm_a8w8_other", "GEMM-A8W8")
    mine = tmp_path / "mine.csv"
    mine.write_text("M,N,K\n33,512,1024\n")
    run = winners(tmp_path / "run", WON_DEFAULT, [{"M": m, "caller": c} for m in (33, 64) for c in ("", QUANT)])
    (fault,) = refused(run, root, default=True, lists=[mine])
    assert f"through {CAT} not measured again: 33x512x1024" in fault
    assert fault.endswith(f"compare its 2 measurements yourself, then give --checked {CAT}")
    assert (run / AITER_FOLDER / RECHECK_LIST).read_text() == "M,N,K\n", "there is nothing that the tuner could measure"
    assert merge_run(run, root, default=True, lists=[mine], checked=[CAT]).changes[0].readers == (QUANT, CAT)
    assert json.loads(text_of(root)[NAME])["checked"] == [CAT]


def test_the_last_merge_is_taken_back_byte_by_byte(root: Path, tmp_path: Path) -> None:
    before, run = text_of(root), winners(tmp_path / "one", WON, [{}])
    (run / "provenance.json").write_text('{"run": "r1", "tuner": "aiter-triton", "argv": ["x"]}')
    merge_run(run, root)
    between = text_of(root)
    line = json.loads(between[NAME])
    assert line["facts"] == {"run": "r1", "tuner": "aiter-triton"}
    assert line["buckets"][0]["measured"] == {"M_LEQ_64": [[None, 512, 1024, 64, 1, 20.0, 15.0, ""]]}
    merge_run(winners(tmp_path / "two", {OWN: {"M_LEQ_64": values(8)}}, [{"old": values(16)}]), root)
    assert undo_merge(root)["restored"] == (str(CONFIGS / "gemm" / OWN),)
    assert text_of(root) == between
    last = undo_merge(root)
    assert (last["run"], last["removed"], last["left"]) == ("one", (str(CONFIGS / "gemm" / OWN),), 0)
    assert text_of(root) == before
    with pytest.raises(InputError, match="nothing to undo"):
        undo_merge(root)
    assert not list(root.rglob("*gemmfleet*")), "no journal and no lock file stays"


def test_the_number_of_a_merge_says_which_of_two_journals_is_the_latest(root: Path, tmp_path: Path) -> None:
    before = text_of(root)
    merge_run(winners(tmp_path / "one", WON, [{}]), root)
    other = root / "vllm" / NAME
    other.parent.mkdir()
    other.write_text(json.dumps({"run": "two", "number": 2, "files": []}) + "\n")
    merge_run(winners(tmp_path / "three", {OWN: {"M_LEQ_64": values(8)}}, [{"old": values(16)}]), root)
    os.utime(root / CONFIGS / NAME, (0, 0))  # by the clock, the merge of AITER's is the older one
    assert [undo_merge(root)["run"] for _ in range(3)] == ["three", "two", "one"]
    assert text_of(root) == before


def test_a_file_changed_since_is_left_alone_and_one_that_was_never_written_is_no_fault(
    root: Path, tmp_path: Path
) -> None:
    before = text_of(root)
    merge_run(winners(tmp_path / "run", WON, [{}]), root)
    (root / CONFIGS / "gemm" / OWN).write_text("{}")
    with pytest.raises(InputError, match="was changed after the merge and is left alone"):
        undo_merge(root)
    (root / CONFIGS / "gemm" / OWN).unlink()
    done = undo_merge(root)
    assert (done["restored"], done["removed"]) == ((), ())
    assert text_of(root) == before


def test_a_journal_holds_any_text_and_a_damaged_one_is_told(root: Path, tmp_path: Path) -> None:
    before = text_of(root)
    merge_run(winners(tmp_path / "run", WON, [{}]), root)
    journal = root / CONFIGS / NAME
    entry = json.loads(journal.read_text())
    journal.write_text(json.dumps({**entry, "run": "a\u2028b"}, ensure_ascii=False) + "\n")
    intact = journal.read_bytes()
    journal.write_bytes(b"\xff\n")
    with pytest.raises(InputError, match=f"{NAME}:1: is damaged, so nothing is undone"):
        undo_merge(root)
    journal.write_bytes(intact)
    assert undo_merge(root)["run"] == "a\u2028b"
    assert text_of(root) == before


FAMILY = get_family("a8w8_blockscale")
NEW = values(64)


def document(m: int, **more: Any) -> str:
    """The text that a winner's row carries: its own M and the bound."""
    points = [[m, 7.0, 20.0, 15.0, 0.001, 0, ""], [64, 0.0, 21.0, 16.0, 0.0, 1, ""]]
    return json.dumps({
        "kind": "a8w8_blockscale", "arch": "gfx950", "bucket": "M_LEQ_64", "values": NEW,
        "old": [values(32), values(16)], "points": points, **more,
    })  # fmt: skip


def of(*rows: tuple[tuple[int, int, int], str]) -> Any:
    return decide_winners(FAMILY, [(key, {DOCUMENT_FIELD: text}) for key, text in rows])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 pages of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("only root can mount a file system")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_leaves_the_tree_as_it_was_or_names_the_way_back(small_disk: Path, tmp_path: Path) -> None:
    """26 levels of free pages: the journal's file fits or not, then the first file, the second, the third."""
    sizes = (512, 768, 1024)
    files = {f"gemm/gfx950-GEMM-A16W16-N={n}-K=1024.json": SHIPPED | {"_note": "x" * 9000} for n in sizes}
    tree(small_disk, {DEFAULT: SHIPPED, **files})
    won = {name.removeprefix("gemm/"): {"M_LEQ_64": values(16)} for name in files}
    rows = [{"N": n, "file": name} for n, name in zip(sizes, won, strict=True)]
    run, before = winners(tmp_path / "run", won, rows), text_of(small_disk)
    outcomes = []
    for free_pages in range(26):
        filled, message = small_disk / "filled", ""
        space = os.statvfs(small_disk)
        filled.write_bytes(b"x" * max(0, space.f_bavail - free_pages) * space.f_bsize)
        try:
            merge_run(run, small_disk)
        except InputError as e:
            message = str(e)
        filled.unlink()
        is_changed, names_undo = text_of(small_disk) != before, "configs undo" in message
        outcomes.append((is_changed, bool(message)))
        assert names_undo == (is_changed and bool(message)), (free_pages, message)
        if is_changed:
            undo_merge(small_disk)
        assert text_of(small_disk) == before, free_pages
    assert {(False, True), (True, False)} <= set(outcomes), outcomes


def test_where_taking_back_fails_as_well_the_message_names_the_way_back(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(journal: MergeJournal) -> dict[str, Any]:
        raise OSError(28, "No space left on device")

    def prove(tree: merging.AiterTree, some: Any, *, after: bool = True) -> LookupTrial:
        if after:
            raise InputError("other values than planned")
        return LookupTrial()

    monkeypatch.setattr(MergeJournal, "take_back", full)
    monkeypatch.setattr(merging.AiterTree, "prove", prove)
    before = text_of(root)
    with pytest.raises(InputError, match=r"could not be taken back \(.*No space left.*free some space.* configs undo "):
        merge_run(winners(tmp_path / "run", WON, [{}]), root)
    monkeypatch.undo()
    undo_merge(root)
    assert text_of(root) == before


def test_what_is_meant_for_the_default_file_is_one_file_of_all_shapes() -> None:
    found, _ = of(*(((20, n, 1024), document(20, default=True)) for n in (512, 256)))
    ((place, decision),) = found.items()
    assert (place.file, place.bucket) == ("gfx950-GEMM-A8W8_BLOCKSCALE.json", "M_LEQ_64")
    assert {(r.n, r.m) for r in decision.measured} == {(n, m) for n in (512, 256) for m in (20, 64)}


def test_a_bucket_that_was_decided_twice_differently_stays() -> None:
    found, (note,) = of(((20, 512, 1024), document(20)), ((48, 512, 1024), document(48, values=values(128))))
    assert not found
    assert "M_LEQ_64 stays as it is: 2 searches decided differently" in note


@pytest.mark.parametrize("text", [
    document(20, values=None), "", "{}", "[]", document(20, bucket="M_20"), document(20, arch="../x"),
    document(20, kind="none"),
])  # fmt: skip
def test_a_bucket_without_a_winner_and_rows_of_no_meaning_are_left_out(text: str) -> None:
    assert of(((20, 512, 1024), text)) == ({}, [])


def test_what_is_written_is_what_the_merge_reads(tmp_path: Path) -> None:
    asked = [Shape(1, (20, 512, 1024)), Shape(2, (48, 512, 1024)), Shape(3, (20, 256, 1024))]
    with Run(tmp_path, groups=((1, 2), (3,)), asked=asked) as r:
        for attempt, shapes in (("g0001-1", (1, 2)), ("g0002-1", (3,))):
            r.send(attempt)
            r.says(started(attempt))
            for i in shapes:
                text = document(asked[i - 1].key[0])  # type: ignore[arg-type]
                r.says(said("shape_tuned", attempt, i, triton_config=text, kernelName="config_x", libtype="triton"))
            r.says(ended(attempt))
        folder = tmp_path / AITER_FOLDER
        folder.mkdir(parents=True)
        (folder / "stale.json").write_text("{}")
        assert write_winners(r.ledger, tmp_path) == []
    found = {f.path.name: f for f in read_winners(tmp_path)}
    assert set(found) == {f"gfx950-GEMM-A8W8_BLOCKSCALE-N={n}-K=1024.json" for n in (512, 256)}
    won = found["gfx950-GEMM-A8W8_BLOCKSCALE-N=512-K=1024.json"].winners["M_LEQ_64"]
    assert won.values == NEW
    assert [(m.m, m.count, m.old_us, m.new_us) for m in won.measured] == [
        (20, 7, 20.0, 15.0), (48, 7, 20.0, 15.0), (64, 0, 21.0, 16.0),
    ]  # fmt: skip
    assert not (folder / "stale.json").exists()


def test_no_table_takes_the_winners(tmp_path: Path) -> None:
    with pytest.raises(TunedDBError, match="configs merge RUN --into TREE"):
        check_db(tmp_path / "a8w8.csv", FAMILY, "aiter-triton")
    (tmp_path / "tuned.csv").write_text(",".join(FAMILY.tuned_header) + "\n")
    (tmp_path / "provenance.json").write_text(json.dumps({"format": 1, "run": "r1", "tuner": "aiter-triton"}))
    with pytest.raises(InputError, match=r"its winners are config files.*configs merge .* --into TREE"):
        open_sources([tmp_path], [], None, FAMILY.name)
