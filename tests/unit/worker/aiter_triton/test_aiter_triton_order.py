"""The order file: how it is made by compiling, what nodes are told of it, and that it is an order and no more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.errors import InputError
from orchestrator.tuners import get_tuner, options_for
from tests.paths import ROOT
from tests.standins.triton_tree import make, values
from worker.protocol import SpecShape
from worker.triton_configs.kinds import BY_NAME
from worker.tuners.aiter_triton.config import config_of
from worker.tuners.aiter_triton.order import Order, for_nodes, read, shape_name, text_of
from worker.tuners.aiter_triton.seeds import Seeds
from worker.tuners.aiter_triton.spec import Options
from worker.tuners.aiter_triton.tasks import TaskMaker
from worker.tuners.aiter_triton.tuner import AiterTritonTuner
from worker.tuners.search.candidate_ranker import CandidateRanker, StopRules
from worker.tuners.search.target import known

ABOUT = {"kind": "a16w16", "gfx": "gfx950", "triton": "3.9.0", "source": "0123456789abcdef"}
KEY: dict[str, int | str] = {
    "M": 16, "N": 64, "K": 128, "bias": "False", "dtype": "torch.bfloat16", "outdtype": "torch.bfloat16",
    "scaleAB": "False", "bpreshuffle": "False",
}  # fmt: skip
SHAPE = "x".join(map(str, KEY.values()))


def document(**statuses: str) -> dict[str, Any]:
    """An order of one shape whose candidates have these statuses."""
    candidates = [{"name": name, "status": status, "why": ""} for name, status in statuses.items()]
    shapes = {SHAPE: {"bucket": "M_LEQ_16", "candidates": candidates}}
    return {"format": 1, "family": "a16w16", "aiter": "", **ABOUT, "shapes": shapes}


def order(spills: list[str], last: list[str], **about: str) -> dict[str, Any]:
    """The part that nodes get, as the option of a tuner."""
    return {**ABOUT, **about, "behind": {SHAPE: [spills, last]}}


def test_nodes_are_told_who_comes_behind(tmp_path: Path) -> None:
    path = tmp_path / "order.json"
    made = document(a="ok", b="waiting", c="spills", d="double", e="unsupported", f="timeout")
    path.write_text(text_of(made))
    assert read(path) == made
    assert path.read_text().count("\n") == 7, "a line a candidate"
    assert options_for(get_tuner("aiter-triton"), {"order": str(path), "family": "a16w16"}) == {
        "order": order(["c"], ["d", "e", "f"]), "family": "a16w16",
    }  # fmt: skip
    parsed = Order.parse(for_nodes(path))
    assert parsed is not None
    assert parsed.levels(SHAPE, ["new", "e", "a", "c"]) == {1: 2, 3: 1}
    assert parsed.levels("1x2x3", ["a"]) == {}


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 0, "shapes": {}}', '{"format": 1, "shapes": {"s": {}}}'])
def test_another_file_is_refused_before_anything_starts(tmp_path: Path, text: str) -> None:
    path = tmp_path / "order.json"
    path.write_text(text)
    with pytest.raises(InputError, match="is no order file"):
        options_for(get_tuner("aiter-triton"), {"order": str(path)})
    with pytest.raises(InputError, match="No such file"):
        options_for(get_tuner("aiter-triton"), {"order": str(tmp_path / "none.json")})
    with pytest.raises(InputError, match="no order file"):
        options_for(get_tuner("aiter-triton"), {"order": {"behind": {}}})


def ranker(count: int = 4) -> CandidateRanker:
    """Candidates far from each other, the first the fastest by its estimate."""
    rules = StopRules(at_least=1, patience=1)
    return CandidateRanker([10.0 + i for i in range(count)], [(9.0 * i,) for i in range(count)], rules)


def test_those_behind_are_tried_after_those_that_could_win_as_well() -> None:
    r = ranker()
    r.put_behind({0: 2, 1: 1})
    assert r.order() == [2, 3, 1, 0]
    r.measured(2, 12.0)
    r.measured(3, 13.0)
    assert r.order() == [1, 0]
    assert r.stop_reason() == "", "they may still win: nothing is dropped"
    r.first([0])
    assert r.order()[0] == 0, "a seed or winner begins all the same"


def test_those_behind_come_before_what_cannot_win() -> None:
    r = ranker(40)
    r.put_behind({0: 1})
    assert r.order()[-1] == 0
    r.measured(1, 11.0)
    assert r.order()[0] == 0
    r.measured(0, 10.0)
    r.measured(2, 12.0)
    assert r.stop_reason() == "no candidate left can win"


def task_order(tree: Path, raw: dict[str, Any] | None) -> list[str]:
    """Names of a shape's candidates as a search tries them."""
    kind, target = BY_NAME["a16w16"], known("gfx950")
    options = replace(Options.parse({"family": "a16w16", "max_candidates": 12, "order": raw}), hints=False)
    context: Any = SimpleNamespace(target=target, emit=SimpleNamespace(alive=lambda: None))
    wrapper: Any = SimpleNamespace(completed=lambda given, _: dict(given))
    making = TaskMaker(context, options, kind, wrapper, Seeds(tree, "gfx950", kind), str(tree))
    refused: list[str] = []
    (bucket,) = making.buckets([SpecShape(1, KEY)], "a16w16", lambda _, why: refused.append(why))
    (made,) = making.tasks(bucket)
    assert not refused
    return [made.task.candidates[i].name for i in made.task.ranker.order()]


@pytest.mark.skipif(not find_spec("triton"), reason="there is no Triton")
def test_a_task_has_all_of_its_candidates_in_the_orders_order(tmp_path: Path) -> None:
    tree = make(tmp_path, {"DEFAULT.json": {"any": values(amd=True)}}, "gfx950")
    plain = task_order(tree, None)
    today, a, b, c, *rest = plain
    assert task_order(tree, order([a, "config_gone"], [b, today])) == [today, c, *rest, a, b]
    assert task_order(tree, {**order([a], []), "behind": {"1x2x3": [[a], []]}}) == plain


@pytest.mark.parametrize(
    ("about", "kept", "words"),
    [
        ({}, True, ""),
        ({"triton": "3.6.0"}, True, "made for triton 3.6.0 (here 3.9.0): it is a weaker hint"),
        ({"source": ""}, True, "made for source unknown (here 0123456789abcdef): it is a weaker hint"),
        ({"gfx": "gfx942"}, False, "made for gfx gfx942 (here gfx950): it is left aside"),
        ({"kind": "a8w8"}, False, "made for kind a8w8 (here a16w16): it is left aside"),
    ],
)
def test_a_node_says_once_what_differs(
    about: dict[str, str], kept: bool, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tuner: Any = AiterTritonTuner()
    tuner._raw = {"family": "a16w16"}
    tuner._source = ABOUT["source"]
    tuner._measurer = SimpleNamespace(opened=SimpleNamespace(info={"triton": "3.9.0"}))
    options = Options.parse({"family": "a16w16", "order": order([], [], **about)})
    for _ in range(2):
        assert (tuner._ordered(options, "gfx950").order is not None) is kept
    printed = capsys.readouterr().out
    assert printed.count("\n") == bool(words)
    assert words in printed


MAKE = """
import json, sys
from pathlib import Path
from worker.tuners.aiter_triton.compile_order import OrderMaker
from worker.tuners.aiter_triton.order import read, text_of
from worker.tuners.aiter_triton.spec import Options

if __name__ == "__main__":
    root, out, stop, keys = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
    maker = OrderMaker(root, "gfx950", Options.parse({"family": "a16w16", "max_candidates": 2}))
    maker.add(keys, read(out) if out.exists() else {})
    told = []
    def progress(done, of):
        told.append((done, of))
        if done == stop:
            raise KeyboardInterrupt
    try:
        maker.compile(2, progress)
    except KeyboardInterrupt:
        pass
    out.write_text(text_of(maker.document()))
    print(json.dumps([len(told), maker.refused]))
"""


@pytest.mark.skipif(not find_spec("triton"), reason="there is no Triton")
def test_candidates_are_compiled_without_a_gpu_and_an_interrupted_order_goes_on(tmp_path: Path) -> None:
    plain = values(32, 32, 64, amd=True)
    spilling = values(128, 128, 64, amd=True, waves_per_eu=8)
    files = {
        "GEMM-A16W16-N=64-K=1024.json": {"M_LEQ_64": spilling, "any": plain},
        "DEFAULT.json": {"any": {**plain, "GROUP_SIZE_M": 8}},  # this kernel has no order of tiles
        "GEMM-A16W16-N=128-K=1024.json": {"any": values(16, 256, 256, amd=True, num_stages=3)},
    }
    tree = make(tmp_path / "tree", files, "gfx950")
    script, out = tmp_path / "make_order.py", tmp_path / "order.json"
    script.write_text(MAKE)
    key = {**KEY, "M": 100, "K": 1024}
    keys = json.dumps([key, {**key, "dtype": "torch.int32"}])

    def made(stop: int) -> tuple[int, list[str]]:
        argv = [sys.executable, "-W", "ignore", str(script), str(tree), str(out), str(stop), keys]
        done = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
        assert done.returncode == 0, done.stderr
        told, refused = json.loads(done.stdout.splitlines()[-1])
        return told, refused

    told, (refused,) = made(3)
    assert told == 3
    assert "torch.int32" in refused
    first = read(out)
    assert list(first["shapes"]) == [shape_name({**key, "M": m}) for m in (100, 256)], "the bucket's bound as well"
    statuses = [c["status"] for s in first["shapes"].values() for c in s["candidates"]]
    assert statuses.count("waiting") == len(statuses) - 3
    told, _ = made(-1)
    assert told == len(statuses) - 3, "what was compiled is not compiled again"
    last = read(out)
    for name, found in last["shapes"].items():
        assert {c["name"] for c in found["candidates"]} == {c["name"] for c in first["shapes"][name]["candidates"]}
        by_name = {c["name"]: c for c in found["candidates"]}
        assert found["candidates"][0]["name"] == config_of(plain).name, "today's"
        assert by_name[config_of(spilling).name]["spills"] > 0
        assert by_name[config_of({**plain, "GROUP_SIZE_M": 8}).name]["why"] == config_of(plain).name
        *compiled, spills, one, other = (c["status"] for c in found["candidates"])
        assert (set(compiled), spills, {one, other}) == ({"ok"}, "spills", {"double", "unsupported"})
