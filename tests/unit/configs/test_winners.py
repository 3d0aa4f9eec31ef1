"""Config files of a run, from its winners' rows, as the merge reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.configs.winners import FIELD, FOLDER, decisions, read_winners, write
from orchestrator.controller.prepare import _counts
from orchestrator.errors import InputError, TunedDBError
from orchestrator.families import get_family
from orchestrator.shapes.model import Shape, ShapeList
from orchestrator.tables.locate import open_sources
from orchestrator.tables.merge import check_db
from tests.support.config_tree import values
from tests.support.ledger_kit import Run, ended, started
from tests.support.ledger_kit import row as said

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
    return decisions(FAMILY, [(key, {FIELD: text}) for key, text in rows])


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
        folder = tmp_path / FOLDER
        folder.mkdir(parents=True)
        (folder / "stale.json").write_text("{}")
        assert write(r.ledger, folder) == []
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


def test_calls_of_the_workload_come_from_the_column_count() -> None:
    shapes = [Shape(1, (16, 512, 1024)), Shape(2, (32, 512, 1024))]
    assert _counts(ShapeList(shapes, annotations={"model": ["a", "b"]})) == {}
    counts = {"16x512x1024": 3.0, "32x512x1024": 0.5}
    assert _counts(ShapeList(shapes, annotations={"count": ["3", "0.5"]})) == {"counts": counts}
    for cell in ("", "many", "0", "nan"):
        with pytest.raises(InputError, match="count of the shape 32x512x1024 is"):
            _counts(ShapeList(shapes, annotations={"count": ["3", cell]}, source="s.csv"))
