"""Stacks and config sets of a bench as they are typed, in the request, and in the records of the sides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.bench import request
from orchestrator.bench.request import config_sets, one_slot, sides
from orchestrator.errors import InputError
from orchestrator.families import get_family
from orchestrator.inventory.load import load_inventory
from orchestrator.paths import RunPaths
from orchestrator.results.bench import Result, compared, record, redacted
from orchestrator.results.comparison import differences
from tests.support.config_tree import tree, values, winners
from worker.protocol.bench import Options, Side, lodge
from worker.triton_configs.resolve import CONFIGS

BATCHED = get_family("batched_bf16")
NAME = "gfx950-BATCHED_GEMM-A16W16"
KEY = (16, 64, 512, 128)


def made(tmp_path: Path, **more: Any) -> dict[str, Any]:
    """The options of a bench of AITER's wrappers."""
    return request.options(sides(more.get("envs", ()), more.get("config_sets", ())), ["aiter-triton"])


def test_switches_follow_the_interpreter_or_image() -> None:
    golden, tot = sides(["golden=/g/python", "tot=/t/python,TRITON_HIP_USE_ASYNC_COPY=1,X="], ())
    assert golden == Side("golden", "/g/python")
    assert tot == Side("tot", "/t/python", variables={"TRITON_HIP_USE_ASYNC_COPY": "1", "X": ""})
    (off, on) = sides(["off=,X=0", "on=,X=a=b"], ())
    assert (off.python, off.image, on.variables) == ("", "", {"X": "a=b"})
    assert sides(["a=image:1,X=1"], ()) == [Side("a", image="image:1", variables={"X": "1"})]


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("tot=/p,X", "--env tot: 'X' is not VAR=VALUE"),
        ("tot=/p,X=1,2", "'2' is not VAR=VALUE (a value holds no comma)"),
        ("tot=/p,1X=1", "'1X=1' is not VAR=VALUE"),
        ("tot=/p,X=\x1b[1m", "is not VAR=VALUE"),
        ("tot=/p,X=1,X=2", "X is there twice"),
        ("tot=/p,HIP_VISIBLE_DEVICES=3", "HIP_VISIBLE_DEVICES is set by gemmfleet itself"),
        ("tot=/p,TRITON_CACHE_DIR=/x", "TRITON_CACHE_DIR is set by gemmfleet itself"),
        ("tot=/p,GEMMFLEET_X=1", "GEMMFLEET_X is set by gemmfleet itself"),
        ("tot=", "--env 'tot=' is not NAME=/path/to/python"),
        ("=/p,X=1", "--env '=/p,X=1' is not"),
    ],
)
def test_a_bad_stack_is_one_clear_line(word: str, words: str) -> None:
    with pytest.raises(InputError) as e:
        sides([word], ())
    (line,) = e.value.faults
    assert words in line


def test_sides_reach_the_workers_and_an_image_has_one_slot(tmp_path: Path) -> None:
    words = ["golden=/g/python", "tot=/t/python,X=1"]
    assert list(Options.parse(made(tmp_path, envs=words)).sides) == sides(words, ())
    source = tmp_path / "inv.yaml"
    source.write_text("defaults: {engine: docker, image: x}\nnodes: {here: {env: {X: '0', Y: '2'}}, there: {}}\n")
    (node,) = load_inventory(one_slot(source, tmp_path / "one.yaml", "here", [3])).nodes.values()
    assert (node.name, node.gpus, dict(node.env)) == ("here", (3,), {"X": "0", "Y": "2"})
    with pytest.raises(ValueError, match=r"sides is .*not a list of \{name, python, image, variables, configs\}"):
        Options.parse({"sides": [{"name": "a"}, "b"]})


def test_a_record_has_the_switches_as_under_test(tmp_path: Path) -> None:
    stacks: list[dict[str, Any]] = [
        {"torch": "2.9", "switches": {"TRITON_X": "0", "HSA_Y": "1"}},
        {"torch": "2.9", "switches": {"HSA_Y": "2"}, "variables": {"TRITON_X": "1", "LD_PRELOAD": "a.so"}},
    ]
    golden, tot = (record(RunPaths(tmp_path), "a", side, stack, []) for side, stack in enumerate(stacks, 1))
    assert tot["switches"] == {"HSA_Y": "2", "TRITON_X": "1", "LD_PRELOAD": "a.so"}
    assert "variables" not in tot
    flat = [
        {**{f"switches.{k}": v for k, v in r["switches"].items()}, "under_test": r.get("under_test", "")}
        for r in (golden, tot)
    ]
    kinds = {d["field"]: d["kind"] for d in differences(flat[0], flat[1])}
    assert kinds == {
        "switches.TRITON_X": "test", "switches.LD_PRELOAD": "test", "switches.HSA_Y": "other", "under_test": "name",
    }  # fmt: skip


class TestSets:
    def test_a_tree_gives_its_gemm_configs_and_one_set_is_compared_with_todays(self, tmp_path: Path) -> None:
        nested = "gfx950/triton/gemm/batched_gemm_a16w16/DEFAULT.json"
        root = tree(tmp_path / "t", {f"gemm/{NAME}.json": {"any": values()}, nested: {"any": values(32)},
                                     "moe/gfx950-MOE.json": {}})  # fmt: skip
        found = config_sets([f"new={root}"])
        assert list(found) == ["today", "new"]
        assert found["today"] == ""
        document = json.loads(found["new"])
        assert sorted(document["files"]) == [f"gemm/{NAME}.json", nested]
        assert document["named"].startswith(f"{root} (2 files, sha256 ")
        below = json.loads(config_sets([f"a={root / CONFIGS}", "b="])["a"])
        assert below["files"] == document["files"]

    def test_a_runs_winners_are_sent_with_their_shapes(self, tmp_path: Path) -> None:
        own, default = f"{NAME}-B=4-N=512-K=1024.json", f"{NAME}.json"
        rows = [{"B": 4, "file": own}, {"B": 4, "file": default}]
        run = winners(
            tmp_path / "r1", {own: {"M_LEQ_64": values(16)}, default: {"M_LEQ_64": values(8)}}, rows, "batched_bf16"
        )
        found = json.loads(config_sets([f"a={run / 'configs/aiter'}"])["a"])["winners"]
        assert [(w["kind"], w["gfx"], w["shape"]) for w in found] == [
            ("batched_bf16", "gfx950", [4, 512, 1024]), ("batched_bf16", "gfx950", None),
        ]  # fmt: skip
        assert found[0]["buckets"] == {"M_LEQ_64": values(16)}
        assert json.loads(config_sets([f"a={run}"])["a"])["winners"] == found

    @pytest.mark.parametrize(
        ("words", "fault"),
        [
            (["a"], "--config-set 'a' is not NAME=DIR"),
            (["a="], "--config-set a=: names no folder"),
            (["a={t}", "a={t}"], "two sets have the name a"),
            (["today={t}"], "today is the node's own set here"),
            (["a={t}/none"], "none: holds neither GEMM configs of AITER (aiter/ops/triton/configs"),
            (["a={t}/bad"], "gfx950-X.json:1:2: no JSON"),
        ],
    )
    def test_a_bad_set_is_one_clear_line(self, tmp_path: Path, words: list[str], fault: str) -> None:
        tree(tmp_path, {f"gemm/{NAME}.json": {"any": values()}})
        tree(tmp_path / "bad", {"gemm/gfx950-X.json": "{"})
        with pytest.raises(InputError) as e:
            config_sets([w.format(t=tmp_path) for w in words])
        (line,) = e.value.faults
        assert fault in line

    def test_the_request_has_a_side_a_set(self, tmp_path: Path) -> None:
        root = tree(tmp_path / "t", {f"gemm/{NAME}.json": {"any": values()}})
        sets = [f"new={root}"]
        options = made(tmp_path, config_sets=sets, envs=["tot=/t/python,X=1"])
        parsed = Options.parse(options)
        assert [(s.name, s.python, dict(s.variables), bool(s.configs)) for s in parsed.sides] == [
            ("today", "/t/python", {"X": "1"}, False), ("new", "/t/python", {"X": "1"}, True),
        ]  # fmt: skip
        lodged, texts = lodge(options)
        assert list(texts.values()) == [parsed.sides[1].configs]
        assert redacted(lodged) == lodged
        assert redacted(options)["sides"][1]["configs"].startswith("sha256 ")
        assert [s.name for s in Options.parse(made(tmp_path, config_sets=sets)).sides] == ["today", "new"]
        for more, fault in (
            ({"envs": ["a=/p", "b=/q"]}, "at most one --env"),
            ({"envs": ["a=image:1"]}, "at most one --env, an interpreter"),
        ):
            with pytest.raises(InputError, match=fault):
                made(tmp_path, config_sets=sets, **more)
        assert request.options(request.sides((), sets), [])["backends"] == ["aiter-triton"]
        with pytest.raises(InputError, match="torch, aiter reads no such configs"):
            request.options(request.sides((), sets), ["torch,aiter-triton,aiter"])

    def test_a_side_names_the_config_of_every_row(self) -> None:
        found = [
            Result(1, KEY, env, "aiter-bmm-bf16", "ok", us=9.0, op="bmm", runs=((1, 9.0),), aiter_config=config)
            for env, config in (("a", "gemm/x.json any 16x64x128"), ("b", ""))
        ]
        head, row = compared(found, BATCHED, "a")
        assert (head[-1], row[-1]) == ("aiter_config", "gemm/x.json any 16x64x128")
        assert "aiter_config" not in next(iter(compared(found, BATCHED, "b")))
