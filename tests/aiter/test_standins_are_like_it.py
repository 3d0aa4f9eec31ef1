"""The stand-in trees against the real files of their dates, both as the probe reads them."""

from __future__ import annotations

import ast
import dataclasses
import inspect as inspecting
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.aiter.checkout import needs_checkout, show
from tests.aiter.versions import tree_of
from tests.standins.aiter import TREES, make_tree
from worker.tuners.aiter.inspect.findings import Findings, inspect

pytestmark = needs_checkout

NOT_ACTED = ("groups_reindexed", "duplicates_fatal", "checks_partial_writes")
"""Facts of AITER that no stand-in acts out."""
OWN_CHOICE = ("a16w16", "fmoe")
"""Families that choose winners and write profiles by code of their own; the stand-ins have one for all."""


@pytest.fixture(scope="module", params=list(TREES))
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Findings, Findings]:
    folder = tmp_path_factory.mktemp("both")
    date = str(request.param)
    real = inspect(tree_of(TREES[date].commit, folder / "real"))
    return real, inspect(make_tree(folder / "standin", date).root)


def test_the_same_verdicts(both: tuple[Findings, Findings]) -> None:
    real, ours = both
    assert {n: v.verdict for n, v in ours.workarounds.items()} == {n: v.verdict for n, v in real.workarounds.items()}
    assert (ours.asm_dir, ours.k256_sound) == (real.asm_dir, real.k256_sound)
    assert not ours.problems


def test_the_same_facts(both: tuple[Findings, Findings]) -> None:
    real, ours = (dataclasses.asdict(f.facts) for f in both)
    assert {k: v for k, v in ours.items() if k not in NOT_ACTED} == {
        k: v for k, v in real.items() if k not in NOT_ACTED
    }


def test_the_same_families_scripts_options_and_keys(both: tuple[Findings, Findings], tmp_path: Path) -> None:
    real, ours = both
    assert set(ours.families) == set(real.families)
    for name, theirs in real.families.items():
        mine = ours.families[name]
        assert mine.flags == theirs.flags, name
        assert mine.key_columns == theirs.key_columns, name
        assert mine.ignored == theirs.ignored, name
        assert mine.path.parts[-2:] == theirs.path.parts[-2:], name
        if name not in OWN_CHOICE:
            assert mine.topk_fault == theirs.topk_fault, name
            assert mine.profile_keeps_last_batch == theirs.profile_keeps_last_batch, name


@pytest.mark.parametrize("date", TREES)
def test_the_same_comparison_of_wrong_values(date: str, tmp_path: Path) -> None:
    """AITER's own checkAllclose, as its mp_tuner calls it with --verbose: an exception, or a returned error."""
    torch = pytest.importorskip("torch")
    check = _comparison(TREES[date].commit, {"torch": torch, "logger": logging.getLogger("aiter")})
    strict = {"catastrophic_check": True} if "catastrophic_check" in inspecting.signature(check).parameters else {}
    right = torch.ones(64, 64)
    if TREES[date].compare_raises:
        with pytest.raises(AssertionError, match="catastrophic error"):
            check(right, right * 3, printLog=True, **strict)
    else:
        assert float(check(right, right * 3, printLog=True, **strict)) == 1.0
    ours = (make_tree(tmp_path, date).root / "aiter/utility/mp_tuner.py") if TREES[date].base else None
    assert (ours is not None and "catastrophic error" in ours.read_text()) == TREES[date].compare_raises


def _comparison(commit: str, names: dict[str, Any]) -> Any:
    """checkAllclose of a commit, with what it needs of its file and no more."""
    body = ast.parse(show(commit, "aiter/test_common.py")).body
    wanted: list[ast.stmt] = [n for n in body if isinstance(n, (ast.Assign, ast.FunctionDef))]
    exec(compile(ast.Module(wanted, []), commit, "exec"), names)
    return names["checkAllclose"]
