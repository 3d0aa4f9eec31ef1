"""Options, stacks and config sets of a bench as they are typed, what reaches the workers, and its files."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from orchestrator.bench import request
from orchestrator.bench.image_passes import one_slot
from orchestrator.bench.request import config_sets, parse_sides
from orchestrator.cli.driving import finish_run
from orchestrator.cli.printer import finish_page
from orchestrator.errors import InputError
from orchestrator.inventory.load import load_inventory
from orchestrator.paths import RunConfig, RunPaths
from orchestrator.results.bench import BenchResults, hide_texts
from tests.kits.fleet import command
from tests.kits.results import A8W8, DEVICE, Run, row
from tests.standins.aiter.config_files import tree, values
from worker.families import BATCHED
from worker.protocol import record
from worker.protocol.bench import BenchOptions, Side, parse_backends
from worker.triton_configs.resolve import CONFIGS

NAME = "gfx950-BATCHED_GEMM-A16W16"


def test_backends_by_name_and_alias() -> None:
    assert (parse_backends("gluon,torch,torch"), parse_backends(["aiter-batched"])) == (
        ("aiter-gluon", "torch"),
        BATCHED,
    )
    with pytest.raises(ValueError, match=r"unknown option 'pace'.*; runs is 0, not a whole number from 1 to 20"):
        BenchOptions.parse({"pace": 1, "runs": 0})
    with pytest.raises(ValueError, match=r"sides is .*not a list of \{name, python, image, variables, configs\}"):
        BenchOptions.parse({"sides": [{"name": "a"}, "b"]})


def test_a_table_is_sent_whole_and_recorded_by_its_hash(tmp_path: Path) -> None:
    path = tmp_path / "tuned.csv"
    path.write_text("gfx,cu_num,M,N,K,us,kernelName\ngfx950,256,16,512,1024,5.0,one\n")
    made = request.tuner_options([], ["torch"], path)
    assert made["table"] == path.read_text()
    assert hide_texts(made)["table"].startswith("sha256 ")
    path.write_text("M,N\n1,2\n")
    with pytest.raises(InputError, match=r"tuned\.csv:1: no column K, us"):
        request.tuner_options([], ["torch"], path)


def test_a_bench_without_a_file_takes_the_guides_fifteen_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = command("bench", "--plan", "--json").ok()
    assert "the FP4 guide's 15 shapes" in done.err
    assert done.json()["asked"] == 15


def test_switches_follow_the_interpreter_or_image_and_reach_the_workers(tmp_path: Path) -> None:
    words = ["golden=/g/python", "tot=/t/python,TRITON_HIP_USE_ASYNC_COPY=1,X=", "off=,X=a=b"]
    assert parse_sides(words, ()) == [
        Side("golden", "/g/python"),
        Side("tot", "/t/python", variables={"TRITON_HIP_USE_ASYNC_COPY": "1", "X": ""}),
        Side("off", variables={"X": "a=b"}),
    ]
    assert list(BenchOptions.parse(request.tuner_options(parse_sides(words, ()), ["torch"])).sides) == parse_sides(
        words, ()
    )
    assert parse_sides(["a=image:1,X=1"], ()) == [Side("a", image="image:1", variables={"X": "1"})]
    source = tmp_path / "inv.yaml"
    source.write_text("defaults: {engine: docker, image: x}\nnodes: {here: {env: {X: '0', Y: '2'}}, there: {}}\n")
    (node,) = load_inventory(one_slot(source, tmp_path / "one.yaml", "here", [3])).nodes.values()
    assert (node.name, node.gpus, dict(node.env)) == ("here", (3,), {"X": "0", "Y": "2"})


@pytest.mark.parametrize(
    ("envs", "sets", "says"),
    [
        (["tot=/p,X=1,2"], [], "'2' is not VAR=VALUE (a value holds no comma)"),
        (["tot=/p,X=1,X=2"], [], "X is there twice"),
        (["tot=/p", "tot=/q"], [], "two environments have the same name"),
        (["tot=/p,HIP_VISIBLE_DEVICES=3"], [], "HIP_VISIBLE_DEVICES is set by gemmfleet itself"),
        (["tot="], [], "--env 'tot=' is not NAME=/path/to/python"),
        ([], ["a="], "--config-set a=: names no folder"),
        ([], ["today={t}"], "today is the node's own set here"),
        ([], ["a={t}/none"], "none: holds neither GEMM configs of AITER (aiter/ops/triton/configs"),
        ([], ["a={t}/bad"], "gfx950-X.json:1:2: no JSON"),
        (["a=/p", "b=/q"], ["a={t}"], "at most one --env"),
    ],
)
def test_bad_sides_are_one_clear_line(tmp_path: Path, envs: list[str], sets: list[str], says: str) -> None:
    tree(tmp_path, {f"gemm/{NAME}.json": {"any": values()}})
    tree(tmp_path / "bad", {"gemm/gfx950-X.json": "{"})
    with pytest.raises(InputError) as e:
        parse_sides(envs, [w.format(t=tmp_path) for w in sets])
    (line,) = e.value.faults
    assert says in line


def test_a_tree_gives_its_gemm_configs_and_one_set_is_compared_with_todays(tmp_path: Path) -> None:
    nested = "gfx950/triton/gemm/batched_gemm_a16w16/DEFAULT.json"
    files: dict[str, Any] = {f"gemm/{NAME}.json": {"any": values()}, nested: {"any": values(32)}}
    root = tree(tmp_path / "t", {**files, "moe/gfx950-MOE.json": {}})
    found = config_sets([f"new={root}"])
    assert (list(found), found["today"]) == (["today", "new"], "")
    document = json.loads(found["new"])
    assert sorted(document["files"]) == sorted(files)
    assert document["named"].startswith(f"{root} (2 files, sha256 ")
    assert json.loads(config_sets([f"a={root / CONFIGS}", "b="])["a"])["files"] == document["files"]

    asked = parse_sides(["tot=/t/python,X=1"], [f"new={root}"])
    options = request.tuner_options(asked, [])
    assert options["backends"] == ["aiter-triton"]
    assert [(s.name, s.python, dict(s.variables), s.configs) for s in BenchOptions.parse(options).sides] == [
        ("today", "/t/python", {"X": "1"}, ""), ("new", "/t/python", {"X": "1"}, found["new"]),
    ]  # fmt: skip
    with pytest.raises(InputError, match="torch, aiter reads no such configs"):
        request.tuner_options(asked, ["torch,aiter-triton,aiter"])


def test_the_compare_line_and_the_records_have_the_order_of_env(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = RunPaths(tmp_path / "r1")
    paths.root.mkdir()
    options: dict[str, Any] = {"backends": ["torch"], "sides": [{"name": name} for name in ("golden", "tot")]}
    RunConfig("r1", 0.0, [], "0", A8W8.name, "bench", "s.csv", "", "i.yaml", options=options).write(paths.config)
    device = {**DEVICE, "bench": {"tot": {"torch": "2.9"}, "golden": {"torch": "2.8"}}}
    with Run(paths.root, ((1, 2),)) as run:
        with run.ledger.transaction():
            run.ledger.set_meta("tuner", "bench")
        run.send("g0001-1", slot="0")
        run.says(record("attempt_started", 1.0, attempt="g0001-1", group="", device=device))
        # the first number to arrive is of tot
        for shape, env, us in ((1, "tot", 202.7), (1, "golden", 100.0), (2, "tot", 405.4)):
            for number in (1, 2, 3):
                more = {"env": env, "run": number, "op": "mm", "libtype": "torch"}
                run.says(row("row", "g0001-1", shape, us=us * (1 + number / 1000), **more))
        BenchResults.of_run(run.ledger, paths, options).write()
    finish_page(finish_run(paths, "finished"))
    (line,) = [text for text in capsys.readouterr().out.splitlines() if text.startswith("next:")]
    words = shlex.split(line)
    sides = words[words.index("compare") + 1 :]
    assert [Path(side).stem for side in sides] == ["golden", "tot"]
    assert [json.loads((paths.root / f"{n}.env.json").read_text())["side"] for n in ("golden", "tot")] == [1, 2]
    assert "+102.7 %" in command("compare", *sides).failed_with(1).out
    swapped = "in the bench r1 the golden side here (tot) was --env number 2"
    command("compare", *reversed(sides)).failed_with(2, swapped)
