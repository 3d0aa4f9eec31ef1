"""Winners of the tuner `vllm`: written by range, merged into a real vLLM's files so that no other M moves, undone.

The look-up is the engine's own. It runs in this process but for the tests that are about a fresh one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.configs import engine_tree as merging
from orchestrator.configs.decisions import DOCUMENT_FIELD
from orchestrator.configs.journal import undo_merge
from orchestrator.configs.merge import merge_run
from orchestrator.configs.winners import ENGINE_FOLDERS, read_winners, write_winners
from orchestrator.errors import InputError
from orchestrator.families import get_family
from tests.paths import ROOT
from tests.support.engines import H200, MI355X, ask_here, copy, tree
from tests.support.marks import WITH_ENGINE
from worker.triton_configs.engine_package import EngineDevice, Layer
from worker.triton_configs.m_ranges import ConfigRange, entries_of, merge_ranges, ranges_served
from worker.triton_configs.pair import join_pair
from worker.triton_configs.point_record import ConfigTime, PointRecord
from worker.triton_configs.serving_engine import load_engine

pytestmark = WITH_ENGINE

LINEAR = Layer("linear", 2112, 7168, dtype="fp8_w8a8", block=(128, 128))
NAME = "N=2112,K=7168,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"
CONFIGS = "vllm/model_executor/layers/quantization/utils/configs"
MOE = "vllm/model_executor/layers/fused_moe/configs"
H100 = EngineDevice("NVIDIA H100", 90)
TOLD = Layer("moe", 1024, 4096, 128, 8, "fp8_w8a8")
"""A layer whose shipped file has the key `triton_version`."""
NEW = {
    "BLOCK_SIZE_M": 32, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 8, "num_warps": 8, "num_stages": 5,
}  # fmt: skip
JOURNAL = "gemmfleet-merges.jsonl"


@pytest.fixture
def near(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "ask_engine", ask_here)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return copy("vllm", tmp_path / "site-packages")


def document(layer: Layer = LINEAR, device: EngineDevice = H200, **more: Any) -> dict[str, Any]:
    """The document of a range as the tuner writes it: new values for M=57-80, measured at its ends and its key."""
    engine = load_engine(tree("vllm"), device)
    out = {
        "project": "vllm", "version": engine.version, "source": engine.source_hash(layer.op), "layer": asdict(layer),
        "device": asdict(device), "named_by": "vllm.platforms", "file": engine.file_name(layer),
        "key": 64, "first": 57, "last": 80, "values": NEW, **more,
    }  # fmt: skip
    if "points" not in more:
        ms = sorted({out["first"], out["key"], out["last"]})
        out["old"] = [engine.config(layer, m) for m in ms]
        out["points"] = [[m, int(m == out["key"]), 20.0, 15.0, 0.001, i, ""] for i, m in enumerate(ms)]
    return out


def ran(run: Path, *documents: Mapping[str, Any], points: Sequence[PointRecord] = (), tuner: str = "vllm") -> Path:
    """A run's folder with what these documents and measured M leave."""
    rows = [SimpleNamespace(key=(16, 2112, 7168), row={DOCUMENT_FIELD: json.dumps(d)}) for d in documents]
    family = get_family("a8w8_blockscale")
    ledger: Any = SimpleNamespace(
        winners=lambda: rows, points=lambda: points, meta=lambda name, default: tuner, family=family
    )
    run.mkdir(exist_ok=True)
    write_winners(ledger, run)
    return run


def texts(root: Path) -> dict[str, str]:
    return {str(p.relative_to(root)): p.read_text() for p in root.rglob("*") if p.is_file() and p.suffix == ".json"}


def picked(table: Mapping[int, Any], m: int) -> Any:
    return table[min(table, key=lambda key: abs(key - m))]


def entries(path: Path) -> dict[int, Any]:
    return {int(key): v for key, v in json.loads(path.read_text()).items() if key != "triton_version"}


def refused(run: Path, root: Path, **options: Any) -> str:
    """The faults of a merge that leaves all files as they were."""
    before = texts(root)
    with pytest.raises(InputError) as e:
        merge_run(run, root, **options)
    assert texts(root) == before
    assert not list(root.rglob(JOURNAL))
    return "\n".join(e.value.faults)


def test_the_engine_in_a_fresh_process_gives_each_m_its_config_and_undo_gives_back_every_byte(
    root: Path, tmp_path: Path
) -> None:
    before = texts(root)
    last = document(key=4096, first=3585, last=8192)
    run = ran(tmp_path / "run", document(), last)

    def said(*args: object) -> str:
        done = CliRunner().invoke(app, ["configs", *map(str, args)])
        assert done.exit_code == 0, done.output
        return done.output

    text = said("merge", run, "--into", root)
    assert f"{CONFIGS.removeprefix('vllm/')}/{NAME}: M=57-80, M=3585-8192 (changed)" in text
    assert "proven by the look-up of vLLM 0.33.0: " in text
    assert "where the driver says 'NVIDIA H200 NVL', vLLM looks for N=2112,K=7168,device_name=NVIDIA_H200_NVL" in text
    old, new = json.loads(before[f"{CONFIGS}/{NAME}"]), entries(root / CONFIGS / NAME)
    old = {int(key): values for key, values in old.items()}
    assert list(new) == sorted(new)
    for m in range(1, 20000):
        assert picked(new, m) == (NEW if 57 <= m <= 80 or 3585 <= m <= 8192 else picked(old, m))
    assert texts(root) == {**before, f"{CONFIGS}/{NAME}": (root / CONFIGS / NAME).read_text()}
    text = said("merge", run, "--into", root / "vllm", "--json")
    assert "in the tree already" in json.loads(text)["notes"][0]
    assert json.loads(said("undo", root, "--json"))["restored"] == [f"{CONFIGS.removeprefix('vllm/')}/{NAME}"]
    assert texts(root) == before
    with pytest.raises(InputError, match="nothing to undo"):
        undo_merge(root)


@pytest.mark.usefixtures("near")
def test_a_file_is_cut_from_the_measured_m_of_all_attempts(root: Path, tmp_path: Path) -> None:
    engine = load_engine(tree("vllm"), H200)
    facts = {name: document()[name] for name in ("project", "version", "source", "layer", "device", "named_by", "file")}

    def measured(m: int, *, us: float = 15.0, count: float = 0.0) -> PointRecord:
        today = ConfigTime(engine.config(LINEAR, m), 20.0, 20.0, 0.0)
        return PointRecord(facts, m, "", count, [today, ConfigTime(NEW, us, us, 0.001)])

    first = [measured(57), measured(64, count=2.0), measured(80)]
    second = [measured(80, us=16.0), measured(96), measured(112, us=20.9), measured(400)]
    run = ran(tmp_path / "run", points=[*first, *second])
    assert texts(run) == texts(ran(tmp_path / "other", points=[*second, *first]))
    (file,) = read_winners(run)
    assert list(file.winners) == ["M=57-96", "M=400-400"]
    assert [(row.m, row.count, row.old_us, row.new_us) for row in file.measured if row.m in (64, 80)] == [
        (64, 2, 20.0, 15.0), (80, 0, 20.0, 16.0)
    ]  # fmt: skip
    merge_run(run, root)
    new = entries(root / CONFIGS / NAME)
    for m in (*range(50, 130), 399, 400, 401):
        assert picked(new, m) == (NEW if 57 <= m <= 96 or m == 400 else engine.config(LINEAR, m)), m


@pytest.mark.usefixtures("near")
def test_a_new_file_gives_the_default_where_nothing_was_proven(root: Path, tmp_path: Path) -> None:
    layer = Layer("moe", 640, 4096, 160, 8, "fp8_w8a8")
    before, engine = texts(root), load_engine(tree("vllm"), MI355X)
    default = {m: engine.config(layer, m) for m in (1, 32, 33, 56, 81, 96, 97, 513, 129 * 160 - 1, 129 * 160, 1 << 20)}
    done = merge_run(ran(tmp_path / "run", document(layer, MI355X)), root / "vllm")
    (change,) = done.changes
    assert (change.before, change.source) == (None, change.path)
    new = entries(change.path)
    assert {m: picked(new, m) for m in default} == default
    assert [picked(new, m) == NEW for m in (56, 57, 80, 81)] == [False, True, True, False]
    assert "every model with its E and N (measured: E=160 N=640 K=4096 topk=8)" in change.readers
    assert [n.rpartition("device_name=")[2].partition(",")[0] for n in done.notes] == [
        "AMD_Instinct_MI355_OAM",
        "0x75b0",
    ]
    assert undo_merge(root)["removed"] == (str(change.path.relative_to(root / "vllm")),)
    assert texts(root) == before


@pytest.mark.usefixtures("near")
def test_a_file_of_an_override_folder_is_whole_and_the_package_stays(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", str(tmp_path / "elsewhere"))
    folder, package = tmp_path / "override", texts(root)
    folder.mkdir()
    run, other = ran(tmp_path / "run", document(TOLD, H100)), document(TOLD, H100, key=8, first=7, last=10)
    done = merge_run(run, folder, engine=root)
    name = document(TOLD, H100)["file"]
    assert [(c.path, c.source.parent) for c in done.changes] == [(folder / name, root / MOE)]
    shipped, written_ = json.loads(package[f"{MOE}/{name}"]), json.loads((folder / name).read_text())
    assert next(iter(written_.items())) == ("triton_version", shipped["triton_version"])
    old, new = entries(root / MOE / name), entries(folder / name)
    assert all(picked(new, m) == (NEW if 57 <= m <= 80 else picked(old, m)) for m in range(1, 20000))
    second = merge_run(ran(tmp_path / "second", other), folder, engine=root)
    assert second.changes[0].source == folder / name
    assert picked(entries(folder / name), 64) == NEW == picked(entries(folder / name), 7)
    assert (undo_merge(folder)["left"], undo_merge(folder)["left"]) == (1, 0)
    assert (texts(folder), texts(root)) == ({}, package)
    linear = ran(tmp_path / "linear", document())
    assert "reads it from" in refused(linear, folder, engine=root)
    assert "if it is an override folder (VLLM_TUNED_CONFIG_FOLDER), name its vLLM with --engine" in refused(run, folder)
    assert "holds an engine itself" in refused(run, root, engine=root)
    assert "there is no such folder" in refused(run, folder / "none", engine=root)


@pytest.mark.usefixtures("near")
@pytest.mark.parametrize(
    ("more", "fault"),
    [
        ({"points": [[m, 1, 20.0, 20.7, 0.0, 0, "zipf 1"] for m in (57, 64, 80)]},
         "M=57 N=2112 K=7168 in zipf 1 would become slower: 20 -> 20.7 us; M=57-80 is left as it is"),
        ({"old": [{"BLOCK_SIZE_M": 1}], "points": [[m, 1, 20.0, 15.0, 0.0, 0, ""] for m in (57, 64, 80)]},
         "M=57 N=2112 K=7168: the tree's M=57-80 is another config than the one measured; tune again with this tree"),
        ({"points": [[m, 1, 20.0, 15.0, 0.0, 0, ""] for m in (57, 64)]}, "M=57-80: was not measured at M=80, its end"),
        ({"file": "N=2112,K=7168.json"}, f"vLLM 0.33.0 looks for {NAME}; tune again with it"),
        ({"project": "sglang", "source": "0"}, "not tuned for vLLM 0.33.0: SGLang's kernel is another"),
    ],
)  # fmt: skip
def test_a_winner_that_does_not_hold_is_refused(root: Path, tmp_path: Path, more: dict[str, Any], fault: str) -> None:
    assert fault in refused(ran(tmp_path / "run", document() | more), root)


@pytest.mark.usefixtures("near")
def test_sglang_is_told_apart_and_flags_of_aiter_are_refused(root: Path, tmp_path: Path) -> None:
    run = ran(tmp_path / "run", document())
    fault = refused(run, copy("sglang", tmp_path / "other"))
    assert "not tuned for SGLang 0.5.23: vLLM's kernel is another" in fault
    assert "--checked for AITER's" in refused(run, root, default=True)
    with pytest.raises(InputError, match="nothing to undo"):
        undo_merge(tmp_path / "run")


@pytest.mark.usefixtures("near")
def test_a_look_up_that_does_not_give_what_was_planned_takes_all_back(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, run, asked = texts(root), ran(tmp_path / "run", document()), list[str]()

    def stale(env: Mapping[str, str], question: Callable[..., Any], *args: Any) -> Any:
        asked.append(question.__name__)
        answer = ask_here(env, question, *args)
        return [{**a, "num_warps": 3} for a in answer] if len(asked) == wrong else answer

    monkeypatch.setattr(merging, "ask_engine", stale)
    wrong = 3  # facts, before, after
    with pytest.raises(InputError, match="vLLM's look-up gives other values than planned, so the files were put back"):
        merge_run(run, root)
    assert texts(root) == before
    asked.clear()
    wrong = 2
    assert "in another way than gemmfleet, and nothing was written" in refused(run, root)


KILLED = """
import os, signal, sys
from pathlib import Path
from orchestrator.configs import engine_tree, journal, merge
from tests.support.engines import ask_here
engine_tree.ask_engine = ask_here
put, left = journal.put_text, [1]
def put_or_die(path, text):
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    put(path, text)
journal.put_text = put_or_die
merge.merge_run(Path(sys.argv[1]), Path(sys.argv[2]))
"""


def test_a_merge_that_was_killed_between_two_files_is_undone(root: Path, tmp_path: Path) -> None:
    before = texts(root)
    second = Layer("linear", 1536, 7168, dtype="fp8_w8a8", block=(128, 128))
    run = ran(tmp_path / "run", document(), document(second))
    done = subprocess.run([sys.executable, "-c", KILLED, run, root], cwd=ROOT, env={**os.environ}, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len([name for name, text in texts(root).items() if text != before[name]]) == 1
    assert len(undo_merge(root)["restored"]) == 1
    assert texts(root) == before


@pytest.mark.usefixtures("near")
def test_undo_gives_back_line_ends_and_leaves_a_file_that_is_no_text(root: Path, tmp_path: Path) -> None:
    path = root / CONFIGS / NAME
    before = path.read_bytes().replace(b"\n", b"\r\n")
    path.write_bytes(before)
    merge_run(ran(tmp_path / "run", document()), root)
    merged = path.read_bytes()
    path.write_bytes(b"\xff")
    with pytest.raises(InputError, match="was changed after the merge"):
        undo_merge(root)
    path.write_bytes(merged)
    undo_merge(root)
    assert path.read_bytes() == before


@pytest.mark.usefixtures("near")
@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('{"1": ', "vllm 0.33.0 cannot read {path}: JSONDecodeError: "),
        ('{"1": 5}', "{path}: the entry of 1 is not a config, but 5"),
    ],
)
def test_a_file_that_the_engine_cannot_read_is_named(root: Path, tmp_path: Path, text: str, fault: str) -> None:
    path = root / CONFIGS / NAME
    path.write_text(text)
    assert fault.format(path=path) in refused(ran(tmp_path / "run", document()), root)


def test_groups_of_a_run_are_joined_range_by_range(tmp_path: Path) -> None:
    wide = Layer("moe", 256, 7168, 256, 8, "fp8_w8a8", (128, 128))
    slim = Layer("moe", 256, 2048, 256, 4, "fp8_w8a8", (128, 128))
    other = {**NEW, "num_warps": 2}
    run = ran(
        tmp_path,
        document(wide), document(slim),
        document(wide, key=8, first=7, last=10), document(slim, key=8, first=7, last=10, values=other),
        document(wide, key=16, first=13, last=20, values=None),
        document(wide, key=256, first=193, last=384), document(wide, key=384, first=300, last=384),
        {"layer": None}, {**document(wide), "file": "../x.json"},
    )  # fmt: skip
    (file,) = read_winners(run)
    assert list(file.winners) == ["M=57-80"]
    assert [(r.m, r.count, r.k) for r in file.measured] == [(m, m == 64, k) for k in (2048, 7168) for m in (57, 64, 80)]
    assert json.loads((run / ENGINE_FOLDERS["vllm"] / file.path.name).read_text()) == {"64": NEW}


@pytest.mark.usefixtures("near")
def test_models_that_share_a_file_are_named_where_they_were_not_measured(root: Path, tmp_path: Path) -> None:
    wide = Layer("moe", 256, 7168, 256, 8, "fp8_w8a8", (128, 128))
    slim = Layer("moe", 256, 2048, 256, 4, "fp8_w8a8", (128, 128))
    here_too = document(slim, key=8, first=7, last=10)
    done = merge_run(ran(tmp_path / "run", document(wide), document(slim), here_too), root)
    assert done.changes[0].readers[-1] == "NVIDIA H200 NVL"
    assert any(n.endswith("M=7-10 was not measured for E=256 N=256 K=7168 topk=8") for n in done.notes)


def test_a_table_without_winners_is_refused_and_of_two_devices_none_wins(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no row: the run proved no winner"):
        read_winners(ran(tmp_path / "none", document(values=None)))
    wide = Layer("moe", 256, 7168, 256, 8, "fp8_w8a8", (128, 128))
    sister = document(wide, EngineDevice("NVIDIA H200 NVL", 90), key=8, first=7, last=10)
    with pytest.raises(InputError, match="has no row"):
        read_winners(ran(tmp_path / "two", document(wide), sister))


SGLANG_MOE = "sglang/srt/layers/moe/moe_runner/triton_utils/configs"
PAIR = join_pair({**NEW, "BLOCK_SIZE_M": 64, "USE_TMA": True}, {**NEW, "BLOCK_SIZE_N": 128, "USE_TMA": True})
OLDER = Layer("moe", 384, 4096, 128, 8, "fp8_w8a8", (128, 128))
"""A layer with a file of an older Triton and none for the second product."""
EXACT = Layer("moe", 128, 4096, 512, 10, "fp8_w8a8", (128, 128))
"""A layer with both files of Triton 3.6.0."""
UNKNOWN = Layer("moe", 1792, 2048, 32, 4)
"""A layer without a file."""


def sglang_document(layer: Layer, triton: str = "3.6.0", **more: Any) -> dict[str, Any]:
    device = EngineDevice("NVIDIA H200", 90, triton)
    engine = load_engine(tree("sglang"), device)
    ms = (57, 64, 80)
    return {
        "project": "sglang", "version": engine.version, "source": engine.source_hash("moe"), "layer": asdict(layer),
        "device": device.to_document(), "named_by": "torch", "file": engine.file_name(layer), "key": 64, "first": 57,
        "last": 80, "values": PAIR, "old": [engine.config(layer, m) for m in ms],
        "points": [[m, int(m == 64), 20.0, 15.0, 0.001, i, ""] for i, m in enumerate(ms)], **more,
    }  # fmt: skip


@pytest.mark.usefixtures("near")
@pytest.mark.parametrize(
    ("layer", "values"), [(OLDER, PAIR), (OLDER, NEW), (EXACT, NEW), (EXACT, PAIR), (UNKNOWN, {**NEW, "USE_TMA": True})]
)
def test_both_files_of_sglangs_experts_change_as_one_and_undo_gives_them_back(
    tmp_path: Path, layer: Layer, values: dict[str, Any]
) -> None:
    root = copy("sglang", tmp_path / "site-packages")
    before, device = texts(root), EngineDevice("NVIDIA H200", 90, "3.6.0")
    run = ran(tmp_path / "run", sglang_document(layer, values=values), tuner="sglang")
    old = load_engine(root, device)
    ms = [*range(1, 20), *range(50, 90), 769, 1280, 4096, 20000]
    todays = {m: old.config(layer, m) for m in ms}
    has_down = layer is EXACT or values is not NEW
    done = merge_run(run, root)
    name = old.file_name(layer)
    down_name = name.replace(".json", "_down.json")
    assert [change.path.name for change in done.changes] == [name, *[down_name][: int(has_down)]]
    assert {change.path.parent for change in done.changes} == {root / SGLANG_MOE / "triton_3_6_0"}
    new = load_engine(root, device)
    assert {m: new.config(layer, m) for m in ms} == {m: values if 57 <= m <= 80 else todays[m] for m in ms}
    for path in (root / SGLANG_MOE / "triton_3_6_0").glob(f"{name.removesuffix('.json')}*"):
        has_tma = any("USE_TMA" in entry for entry in json.loads(path.read_text()).values())
        assert not has_tma or path.with_name(down_name).exists(), "SGLang would hand it on to the second product"
    assert (run / ENGINE_FOLDERS["sglang"] / down_name).exists() == (values is not NEW)
    undo_merge(root)
    assert texts(root) == before


def test_times_of_tritons_interpreter_are_refused(root: Path, tmp_path: Path) -> None:
    run = ran(tmp_path / "run", document())
    device = {"gfx": "cpu", "interpreter": "right answers only: its times are no GPU's"}
    (run / "provenance.json").write_text(json.dumps({"devices": [{"node": "n1", "device": device}]}))
    assert "n1 measured in Triton's interpreter (TRITON_INTERPRET=1), whose times say nothing" in refused(run, root)


@pytest.mark.usefixtures("near")
def test_a_folder_that_sglangs_look_up_cannot_read_is_not_made(tmp_path: Path) -> None:
    root = copy("sglang", tmp_path / "site-packages")
    run = ran(tmp_path / "run", sglang_document(UNKNOWN, "3.6.0+git1"), tuner="sglang")
    assert "tune with a release of Triton" in refused(run, root)
    (tmp_path / "mine").mkdir()
    assert f"SGLang reads {tmp_path}/mine/configs, which does not exist" in refused(run, tmp_path / "mine", engine=root)


def test_a_whole_folder_of_configs_is_asked_with_the_engine_that_reads_it(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    (folder / "configs").mkdir(parents=True)
    run = ran(tmp_path / "run", sglang_document(UNKNOWN), tuner="sglang")
    done = merge_run(run, folder, engine=tree("sglang"))
    assert {change.path.parent for change in done.changes} == {folder / "configs" / "triton_3_6_0"}
    assert done.lookups > 0
    assert len(undo_merge(folder)["removed"]) == 2
    assert list(folder.rglob("*")) == [folder / "configs"], "nothing of ours stays, and the user's folder does"


KEYS = st.lists(st.integers(1, 200), min_size=1, max_size=8, unique=True)


@given(KEYS, st.lists(st.tuples(st.integers(1, 200), st.integers(0, 30)), max_size=4), st.data())
def test_whatever_the_file_and_the_ranges_every_m_gets_what_was_meant(
    keys: list[int], spans: list[tuple[int, int]], data: st.DataObject
) -> None:
    keys.sort()
    values = data.draw(st.lists(st.integers(0, 2), min_size=len(keys), max_size=len(keys)))
    table = {key: {"a": v} for key, v in zip(keys, values, strict=True)}
    old = [ConfigRange(first, last, table[key], key) for key, (first, last) in ranges_served(keys).items()]
    won: list[ConfigRange] = []
    for first, more in spans:
        if not any(first <= (w.last or 0) and w.first <= first + more for w in won):
            won.append(ConfigRange(first, first + more, {"a": data.draw(st.integers(0, 3))}, first + more // 2))
    new = entries_of(merge_ranges(old, won))
    assert list(new) == sorted(new)
    for m in range(1, 300):
        mine = next((w.values for w in won if w.holds(m)), None)
        assert picked(new, m) == (picked(table, m) if mine is None else mine)
