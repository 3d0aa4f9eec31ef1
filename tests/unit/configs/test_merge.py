"""Winners of a run merged into a tree: proven, laid out so that no other M moves, undone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.configs import aiter as merging
from orchestrator.configs.aiter import LIST, Call, Trial, run_trial
from orchestrator.configs.merge import merge, undo
from orchestrator.configs.winners import FOLDER, TABLE, read_winners
from orchestrator.errors import InputError
from tests.support.config_tree import operator, resolved, text_of, tree, values, winners
from worker.triton_configs.resolve import CONFIGS, bucket_for, laid_out, parse

NAME = "gemmfleet-merges.jsonl"
OWN = "gfx950-GEMM-A16W16-N=512-K=1024.json"
QUANT, CAT = "fused_gemm_a16w16_quant_x", "fused_gemm_a16w16_split_cat"
"""A fused operator that the tuner can call, and one of which nobody here knows its operands."""
DEFAULT = "gemm/gfx950-GEMM-A16W16.json"
BOUNDS = (16, 64, 256, 512)
BUCKETS = [*(f"M_LEQ_{x}" for x in BOUNDS), *(f"M_GEQ_{x}" for x in BOUNDS)]
SHIPPED = {"_note": "by hand", "M_LEQ_64": values(32), "M_LEQ_256": values(64), "any": values(128)}
WON = {OWN: {"M_LEQ_64": values(16)}}


@pytest.fixture(autouse=True)
def trials(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[Call]]:
    """Lookups in place of a trial, which needs Triton."""
    asked: list[Sequence[Call]] = []

    def trial(root: Path, arch: str, calls: Sequence[Call], *, alone: bool) -> Trial:
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
        merge(run, root, **options)
    assert text_of(root) == before
    return e.value.faults


class TestWhatIsWritten:
    def test_a_new_file_holds_every_bucket_of_the_default_and_moves_no_other_m(
        self, root: Path, tmp_path: Path, trials: list[Sequence[Call]]
    ) -> None:
        done = merge(winners(tmp_path / "run", WON, [{}, {"M": 40, "count": 3}]), root)
        written = text_of(root)[f"gemm/{OWN}"]
        assert parse(written).document == {
            "M_LEQ_16": values(32), "M_LEQ_64": values(16), "M_LEQ_256": values(64), "any": values(128),
        }  # fmt: skip
        assert next(iter(parse(written).document)) == "M_LEQ_16"
        assert written.startswith('{\n  "M_LEQ_16": {\n    "BLOCK_SIZE_M"')  # the default's indent
        assert [(c.path.name, c.before, c.source.name, c.callers) for c in done.changes] == [
            (OWN, None, "gfx950-GEMM-A16W16.json", (QUANT,))
        ]
        now, after = trials
        assert now == after
        assert {(c.N, c.K) for c in now} == {(512, 1024), (256, 1024), (513, 64)}
        assert {c.M for c in now} == {16, 17, 64, 65, 256, 257, 4096, 4097}
        assert done.lookups == len(now) == 24

    def test_a_file_that_is_there_keeps_its_other_keys(self, root: Path, tmp_path: Path) -> None:
        tree(root, {f"gemm/{OWN}": {"_note": "mine", "M_LEQ_16": values(8), "M_LEQ_64": values(32), "any": values(2)}})
        merge(winners(tmp_path / "run", WON, [{}]), root)
        assert json.loads(text_of(root)[f"gemm/{OWN}"]) == {
            "_note": "mine", "M_LEQ_16": values(8), "M_LEQ_64": values(16), "any": values(2),
        }  # fmt: skip

    def test_a_second_merge_of_the_same_run_changes_nothing(self, root: Path, tmp_path: Path) -> None:
        run = winners(tmp_path / "run", WON, [{}])
        merge(run, root)
        before = text_of(root)
        again = merge(run, root)
        assert not again.changes
        assert "in the tree already" in again.notes[0]
        assert text_of(root) == before

    @given(
        st.fixed_dictionaries(
            {"any": st.just({"a": -1})}, optional={b: st.just({"a": i}) for i, b in enumerate(BUCKETS)}
        ),
        st.sets(st.sampled_from([*BUCKETS[:4], "any"])),
    )
    def test_whatever_the_file_and_the_winners_no_other_m_moves(self, old: dict[str, Any], names: set[str]) -> None:
        won: dict[str, Any] = {n: {"a": 10 + i} for i, n in enumerate(sorted(names))}
        if bucket_for(old, 513, BOUNDS) != "any":
            won.pop("any", None)
        try:
            new = laid_out(old, won, BOUNDS)
        except ValueError:
            assert any(b.startswith("M_GEQ") for b in old)
            return
        for m in range(1, 600):
            mine = next((f"M_LEQ_{x}" for x in BOUNDS if m <= x), "any")
            assert new[bucket_for(new, m, BOUNDS)] == won.get(mine, old[bucket_for(old, m, BOUNDS)])


class TestWhatIsRefused:
    def test_an_m_that_would_become_slower(self, root: Path, tmp_path: Path) -> None:
        run = winners(tmp_path / "run", WON, [{}, {"M": 40, "old_us": 10.0, "new_us": 10.6}])
        assert refused(run, root) == [
            f"{run / FOLDER / TABLE}:3: M=40 N=512 K=1024 would become slower: 10 -> 10.6 us; M_LEQ_64 is left as it is"
        ]

    def test_noise_and_very_short_kernels_do_not_count_as_slower(self, root: Path, tmp_path: Path) -> None:
        rows = [{"old_us": 10.0, "new_us": 10.5}, {"M": 40, "old_us": 2.0, "new_us": 3.9}]
        assert merge(winners(tmp_path / "run", WON, rows), root).changes

    def test_a_config_that_was_not_the_trees(self, root: Path, tmp_path: Path) -> None:
        (fault,) = refused(winners(tmp_path / "run", WON, [{"old": values(64)}]), root)
        assert "M=64 N=512 K=1024: the tree's M_LEQ_64 is another config than the one measured" in fault

    def test_a_bound_that_was_not_measured(self, root: Path, tmp_path: Path) -> None:
        (fault,) = refused(winners(tmp_path / "run", WON, [{"M": 40}]), root)
        assert fault.endswith("M_LEQ_64: was not measured at M=64, its bound")

    def test_an_m_of_another_bucket(self, root: Path, tmp_path: Path) -> None:
        (fault,) = refused(winners(tmp_path / "run", WON, [{}, {"M": 65, "old": values(64)}]), root)
        assert "M=65 N=512 K=1024 does not resolve to M_LEQ_64 but to M_LEQ_256" in fault

    def test_a_key_that_is_missing_or_forbidden_and_a_bucket_that_is_never_found(
        self, root: Path, tmp_path: Path
    ) -> None:
        won = {OWN: {"M_LEQ_64": {k: v for k, v in values(16, kpack=2).items() if k != "num_warps"}}}
        faults = refused(winners(tmp_path / "run", won, [{}]), root)
        assert f"{OWN}: M_LEQ_64: lacks num_warps" in faults
        assert any("kpack is not allowed on gfx950" in f for f in faults)
        never = winners(tmp_path / "never", {OWN: {"M_LEQ_31": values(16)}}, [{"bucket": "M_LEQ_31", "M": 31}])
        assert any("never found" in f for f in refused(never, root))

    def test_a_tree_that_aiter_reads_otherwise(
        self, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(merging, "run_trial", lambda root, arch, calls, alone: Trial(tuple({} for _ in calls), "x"))
        (fault,) = refused(winners(tmp_path / "run", WON, [{}]), root)
        assert "reads this tree in another way than gemmfleet, and nothing was written" in fault

    def test_a_file_that_aiter_does_not_find_is_taken_back(
        self, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first: list[Trial] = []

        def stale(root: Path, arch: str, calls: Sequence[Call], *, alone: bool) -> Trial:
            first.append(resolved(root, arch, calls))
            return first[0]

        monkeypatch.setattr(merging, "run_trial", stale)
        (fault,) = refused(winners(tmp_path / "run", WON, [{}]), root)
        assert "does not give what was planned, and everything is as it was: GEMM-A16W16 M=17 N=512" in fault
        assert len(first) == 2

    def test_without_triton_the_reading_counts_and_is_said(
        self, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(merging, "run_trial", lambda *_, **__: Trial(why_not="no triton"))
        done = merge(winners(tmp_path / "run", WON, [{}]), root)
        assert (done.proof, done.notes) == ("", ["proven by gemmfleet's own reading only: no triton"])

    @pytest.mark.parametrize(
        ("row", "fault"),
        [
            ({"kind": "fmoe"}, "is not a config of the kind 'fmoe'"),
            ({"bucket": "M_64"}, "is no bucket"),
            ({"bucket": "any"}, "has no bucket any"),
            ({"N": 0}, "N is '0', not a whole number from 1 on"),
            ({"new_us": -1}, "is not a measurement"),
            ({"old": [1]}, "is not a measurement"),
            ({"file": "../x.json"}, "file is '../x.json'"),
            ({"file": "gfx950-GEMM-A16W16-N=1-K=1.json"}, "No such file"),
        ],
    )
    def test_a_row_that_is_none(self, row: dict[str, Any], fault: str, tmp_path: Path) -> None:
        run = winners(tmp_path / "run", WON, [{}, row])
        with pytest.raises(InputError) as e:
            read_winners(run)
        assert e.value.faults[0].startswith(f"{run / FOLDER / TABLE}:3: ")
        assert fault in e.value.faults[0]

    def test_a_run_without_winners_and_a_folder_without_configs(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"holds no configs/aiter/tuned\.csv"):
            merge(tmp_path, tmp_path)
        with pytest.raises(InputError, match="has no row"):
            read_winners(winners(tmp_path / "run", WON, []))
        with pytest.raises(InputError, match="has no Triton configs of AITER"):
            merge(winners(tmp_path / "other", WON, [{}]), tmp_path)


WON_DEFAULT = {"gfx950-GEMM-A16W16.json": {"M_LEQ_64": values(16)}}


class TestTheDefault:
    def test_it_changes_on_request_only(self, root: Path, tmp_path: Path) -> None:
        (fault,) = refused(winners(tmp_path / "run", WON_DEFAULT, [{}]), root)
        assert "changes a default file, which every shape without a file of its own reads" in fault

    def test_every_reader_is_measured_again_first(self, root: Path, tmp_path: Path) -> None:
        configs = root / "aiter" / "configs"
        (configs / "model_configs").mkdir(parents=True)
        (configs / "bf16_tuned_gemm.csv").write_text(
            "gfx,cu_num,M,N,K,us\ngfx950,256,33,512,1024,1\ngfx950,256,64,256,1024,1\n"
        )
        (configs / "model_configs" / "bf16_untuned_gemm_x.csv").write_text("M,N,K\n64,768,128\n65,768,128\n")
        mine = tmp_path / "mine.csv"
        mine.write_text("M,N,K\n20,96,64\n")
        run = winners(tmp_path / "run", WON_DEFAULT, [{}])
        own, fused = refused(run, root, default=True, lists=[mine])
        # 64x256x1024 has a file of its own, M = 65 another bucket
        assert "3 shapes of 3 that read M_LEQ_64 through gemm_a16w16 not measured again: 20x96x64, 33x512x1024" in own
        assert f"through {QUANT} not measured again" in fused
        todo = f"tune {run / FOLDER / LIST} with the same -O default (6 measurements, old and new), then merge that run"
        assert own.endswith(todo)
        assert f"{todo} (where it cannot run, a slot's log says why; --checked {QUANT}" in fused
        assert (run / FOLDER / LIST).read_text() == "M,N,K\n20,96,64\n33,512,1024\n64,768,128\n"
        shapes = [{"M": 64}, {"M": 33}, {"M": 64, "N": 768, "K": 128}, {"M": 20, "N": 96, "K": 64}]
        every = [{**s, "caller": c} for s in shapes for c in ("", QUANT)]
        harmful = winners(tmp_path / "harmful", WON_DEFAULT, [*every[:-1], {**every[-1], "new_us": 22.0}])
        (fault,) = refused(harmful, root, default=True, lists=[mine])
        assert f"M=20 N=96 K=64 in {QUANT} would become slower: 20 -> 22 us" in fault
        done = merge(winners(tmp_path / "all", WON_DEFAULT, every), root, default=True, lists=[mine])
        assert [c.path.name for c in done.changes] == ["gfx950-GEMM-A16W16.json"]
        assert json.loads(text_of(root)[DEFAULT]) == SHIPPED | {"M_LEQ_16": values(32), "M_LEQ_64": values(16)}

    def test_an_operator_that_the_tuner_cannot_call_is_the_users_to_check(self, root: Path, tmp_path: Path) -> None:
        operator(operator(root, CAT), "fused_gemm_a8w8_other", "GEMM-A8W8")
        mine = tmp_path / "mine.csv"
        mine.write_text("M,N,K\n33,512,1024\n")
        rows = [{"M": m, "caller": c} for m in (33, 64) for c in ("", QUANT)]
        run = winners(tmp_path / "run", WON_DEFAULT, rows)
        (fault,) = refused(run, root, default=True, lists=[mine])
        assert f"through {CAT} not measured again: 33x512x1024" in fault
        assert fault.endswith(f"compare its 2 measurements yourself, then give --checked {CAT}")
        assert (run / FOLDER / LIST).read_text() == "M,N,K\n", "there is nothing that the tuner could measure"
        done = merge(run, root, default=True, lists=[mine], checked=[CAT])
        assert done.changes[0].callers == (QUANT, CAT)
        assert json.loads(text_of(root)[NAME])["checked"] == [CAT]

    def test_a_list_without_sizes_is_refused(self, root: Path, tmp_path: Path) -> None:
        mine = tmp_path / "mine.csv"
        mine.write_text("M,N\n1,2\n")
        (fault,) = refused(winners(tmp_path / "run", WON_DEFAULT, [{}]), root, default=True, lists=[mine])
        assert fault.endswith("lacks K: no list of shapes of a16w16")


class TestUndo:
    def test_the_last_merge_is_taken_back_byte_by_byte(self, root: Path, tmp_path: Path) -> None:
        before = text_of(root)
        merge(winners(tmp_path / "one", WON, [{}]), root)
        between = text_of(root)
        merge(winners(tmp_path / "two", {OWN: {"M_LEQ_64": values(8)}}, [{"old": values(16)}]), root)
        assert undo(root).restored == (str(CONFIGS / "gemm" / OWN),)
        assert text_of(root) == between
        last = undo(root)
        assert (last.run, last.removed, last.left) == ("one", (str(CONFIGS / "gemm" / OWN),), 0)
        assert text_of(root) == before
        with pytest.raises(InputError, match="nothing to undo"):
            undo(root)

    def test_the_journal_says_who_measured_what(self, root: Path, tmp_path: Path) -> None:
        run = winners(tmp_path / "run", WON, [{}])
        (run / "provenance.json").write_text('{"run": "r1", "tuner": "aiter-triton", "argv": ["x"]}')
        merge(run, root)
        line = json.loads(text_of(root)[NAME])
        assert line["facts"] == {"run": "r1", "tuner": "aiter-triton"}
        assert line["buckets"][0]["measured"] == {"M_LEQ_64": [[None, 512, 1024, 64, 1, 20.0, 15.0, ""]]}

    def test_a_file_changed_since_is_left_alone(self, root: Path, tmp_path: Path) -> None:
        merge(winners(tmp_path / "run", WON, [{}]), root)
        (root / CONFIGS / "gemm" / OWN).write_text("{}")
        before = text_of(root)
        with pytest.raises(InputError, match="was changed after the merge and is left alone"):
            undo(root)
        assert text_of(root) == before

    def test_a_merge_that_was_cut_off_before_its_files_is_undone(self, root: Path, tmp_path: Path) -> None:
        before = text_of(root)
        merge(winners(tmp_path / "run", WON, [{}]), root)
        (root / CONFIGS / "gemm" / OWN).unlink()
        done = undo(root)
        assert (done.restored, done.removed) == ((), ())
        assert text_of(root) == before

    def test_a_foreign_line_in_the_journal(self, root: Path) -> None:
        (root / CONFIGS / NAME).write_text("hello\n")
        with pytest.raises(InputError, match="was not written by gemmfleet"):
            undo(root)


@pytest.mark.parametrize("package", ["triton", "packaging"])
def test_a_trial_without_a_package_says_so(root: Path, tmp_path: Path, package: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho \"ModuleNotFoundError: No module named '{package}'\" >&2\nexit 1\n")
    python.chmod(0o755)
    trial = run_trial(root, "gfx950", [], python=str(python))
    assert trial.why_not.endswith(f"No module named '{package}'; install gemmfleet[triton]")
    assert "did not run" in run_trial(root, "gfx950", [], python=str(tmp_path / "none")).why_not
