"""`gemmfleet triton-config order` as a user runs it; the compiler is replaced by a stand-in."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.triton_configs import order as ordering
from worker.tuners.aiter_triton import compile_order
from worker.tuners.aiter_triton.order import read
from worker.tuners.aiter_triton.spec import Options

pytest.importorskip("triton")


class StandIn:
    """A maker of orders whose compiler finds one candidate of a shape that spills; the second shape is interrupted."""

    made: ClassVar[list[tuple[Path, str, Options]]] = []
    given: ClassVar[list[Mapping[str, Any]]] = []

    def __init__(self, root: Path, gfx: str, options: Options) -> None:
        if gfx != "gfx950":
            raise ValueError(f"no datasheet of {gfx} is known")
        self.made.append((root, gfx, options))
        self.refused = ["7x64x128: K is 128"]
        self._shapes: dict[str, Any] = {}

    def add(self, keys: Sequence[Mapping[str, int | str]], earlier: Mapping[str, Any]) -> None:
        self.given.append(earlier)
        self._keys = keys

    def compile(self, jobs: int, progress: Callable[[int, int], None]) -> None:
        for key in self._keys:
            if key["M"] == 13:
                raise KeyboardInterrupt
            found = [{"name": name, "status": name, "why": ""} for name in ("ok", "ok", "spills")]
            self._shapes[str(key["M"])] = {"bucket": "M_LEQ_16", "candidates": found}
            progress(len(self._shapes), len(self._keys))

    def document(self) -> dict[str, Any]:
        return {"format": 1, "shapes": self._shapes}


@pytest.fixture
def shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(compile_order, "OrderMaker", StandIn)
    monkeypatch.setattr(StandIn, "made", [])
    monkeypatch.setattr(StandIn, "given", [])
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "shapes.csv"
    path.write_text("M,N,K\n5,64,128\n7,64,128\n")
    return path


def run(*args: str | Path) -> Any:
    return CliRunner().invoke(app, ["triton-config", "order", *map(str, args)])


def test_the_order_is_written_and_how_to_use_it_is_told(shapes: Path) -> None:
    args = (shapes, "--family", "a16w16", "--gfx", "gfx950", "--build", shapes.parent)
    done = run(*args)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0] == "order.json: 2 shapes at 2 M: 4 ok, 2 spills"
    assert done.stderr == "note: 7x64x128: K is 128\n"
    assert lines[-1].endswith(f"tune {shapes} --tuner aiter-triton --family a16w16 -O order=order.json")
    assert len(read(Path("order.json"))["shapes"]) == 2
    told = json.loads(run(*args, "--json").stdout)
    assert (told["out"], told["points"], told["candidates"]) == ("order.json", 2, {"ok": 4, "spills": 2})
    assert StandIn.given == [{}, read(Path("order.json"))], "the second time it goes on"


def test_ctrl_c_leaves_what_was_compiled(shapes: Path) -> None:
    shapes.write_text("M,N,K\n5,64,128\n13,64,128\n")
    done = run(shapes, "--family", "a16w16", "--gfx", "gfx950", "--build", shapes.parent, "--out", "mine.json")
    assert done.exit_code == 130
    assert "mine.json: what was compiled is kept, the same command goes on" in done.stderr
    assert list(read(Path("mine.json"))["shapes"]) == ["5"]


def test_what_was_compiled_is_saved_meanwhile(shapes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordering, "SAVE_S", 0.0)
    out, seen = shapes.with_name("mine.json"), []

    def progress(done: int, of: int) -> None:
        seen.append(list(read(out)["shapes"]) if out.exists() else [])

    ordering.make_order(shapes, "a16w16", shapes.parent, "gfx950", out, 1, progress)
    assert seen == [[], ["5"]]


def test_a_kind_without_a_family_of_its_own_has_the_shapes_of_another(shapes: Path) -> None:
    shapes.write_text("M,N,K\n5,64,128\n")
    done = run(shapes, "--family", "a4w4_preshuffle", "--gfx", "gfx950", "--build", shapes.parent)
    assert done.exit_code == 0, done.output
    ((_, _, options),) = StandIn.made
    assert (options.family, options.kind) == ("a4w4_blockscale", "a4w4_preshuffle")
    assert "-O kind=a4w4_preshuffle" in done.output


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--family", "fmoe", "--gfx", "gfx950"), "--family fmoe: AITER has no Triton GEMM"),
        (("--family", "a16w16", "--gfx", "gfx1"), "no order for gfx1: no datasheet of gfx1"),
        (("--family", "a16w16", "--gfx", "gfx950", "--out", "shapes.csv"), "--out shapes.csv: it is there, and"),
    ],
)
def test_a_mistake_is_one_line(shapes: Path, args: tuple[str, ...], words: str) -> None:
    before = shapes.read_text()
    done = run(shapes, *args, "--build", shapes.parent)
    assert words in str(done.exception)
    assert shapes.read_text() == before


def test_without_a_compiler_the_way_out_is_named(shapes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordering, "find_spec", lambda name: None)
    done = run(shapes, "--family", "a16w16", "--gfx", "gfx950", "--build", shapes.parent)
    assert "install gemmfleet[triton,torch]" in str(done.exception)
