"""A kind of candidate that was never tried is pointed out: in words, by image and chip, and only where it should be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.results.untried_kinds import holds, untried_kinds
from tests.support.ledger_kit import DEVICE, Run
from worker.protocol import record

BOTH: dict[str, list[str]] = {"ck": [], "cktile": []}


def ready(kinds: dict[str, Any], key: str = "one", gfx: str = "gfx950") -> dict[str, Any]:
    device = {**DEVICE, "gfx": gfx, "aiter": {"key": key, "kinds": kinds}}
    return record("tuner_ready", 1.0, tuner="aiter", device=device, seconds=1.0)


def missing(folder: Path, *kinds: dict[str, Any]) -> list[str]:
    """Notes on a run whose node n1 (and n2, ...) reported `kinds` and tried ck kernels only."""
    with Run(folder) as run:
        for n, said in enumerate(kinds, 1):
            run.says(said, node=f"n{n}")
            run.send(f"g{n:04d}-1", node=f"n{n}")
            run.tune(f"g{n:04d}-1", *((1, 2), (3,))[n - 1], node=f"n{n}")
        return untried_kinds(run.ledger)


def test_a_kind_that_no_shape_was_tried_with(tmp_path: Path) -> None:
    (words,) = missing(tmp_path, ready(BOTH))
    assert words.startswith("no cktile candidate was tried in 2 shapes on n1")
    assert "gfx950" in words


@pytest.mark.parametrize("kinds", [{"ck": []}, {}, {"asm": ["K % 256"]}, {"asm": ["q_dtype_w = torch.int8"]}])
def test_what_no_shape_should_have_is_not_missed(tmp_path: Path, kinds: dict[str, list[str]]) -> None:
    assert missing(tmp_path, ready(kinds)) == []


def test_a_condition_that_holds(tmp_path: Path) -> None:
    (words,) = missing(tmp_path, ready({"asm": ["N % 48,64"]}))
    assert "in 2 shapes (N % 48,64)" in words


def test_one_image_on_two_nodes_counts_once_and_two_images_each(tmp_path: Path) -> None:
    for name, (first, second), count in (("one", ("a", "a"), 1), ("two", ("a", "b"), 2)):
        (tmp_path / name).mkdir()
        words = missing(tmp_path / name, ready(BOTH, first), ready(BOTH, second))
        assert len(words) == count
    assert "2 shapes on n1, " in words[0]
    assert "1 shape on n2, " in words[1]


def test_other_tuners_and_odd_words_of_a_node_are_passed_over(tmp_path: Path) -> None:
    for n, odd in enumerate(({"ck": "x"}, {"ck": [1]}, "ck", None)):
        (tmp_path / str(n)).mkdir()
        assert missing(tmp_path / str(n), ready(odd)) == []  # type: ignore[arg-type]


def test_conditions() -> None:
    key: dict[str, int | str] = {"N": 576, "q_dtype_w": "torch.int8"}
    assert holds("N % 64", key)
    assert holds("N % 128,64", key)
    assert not holds("N % 128", key)
    assert holds("q_dtype_w = torch.int8,x", key)
    for odd in ("N", "", "N > 3", "B % 2", "N % x", "N % 0"):
        assert not holds(odd, key)
