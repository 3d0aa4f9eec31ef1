"""The stand-in trees against the real files of their dates, both as the probe reads them."""

from __future__ import annotations

import ast
import inspect as inspecting
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.aiter.checkout import needs_checkout, show
from tests.aiter.versions import tree_of
from tests.standins.aiter import TREES, make_tree
from worker.tuners.aiter.findings import Findings, inspect

pytestmark = needs_checkout


@pytest.fixture(scope="module", params=list(TREES))
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Findings, Findings]:
    folder = tmp_path_factory.mktemp("both")
    date = str(request.param)
    real = inspect(tree_of(TREES[date].commit, folder / "real"))
    return real, inspect(make_tree(folder / "standin", date).root)


def test_the_same_verdicts(both: tuple[Findings, Findings]) -> None:
    """But that the runbook's image has the a4w4 script of another date than the list."""
    real, ours = both
    theirs = {n: v.verdict for n, v in real.workarounds.items()}
    if not ours.k256_sound:
        theirs["tile_column_case"] = "needed"
    assert {n: v.verdict for n, v in ours.workarounds.items()} == theirs
    assert (ours.asm_dir, ours.k256_sound, ours.promised) == (real.asm_dir, real.k256_sound, True)
    assert not ours.problems


def test_the_same_families_scripts_options_and_columns(both: tuple[Findings, Findings]) -> None:
    real, ours = both
    assert set(ours.families) == set(real.families)
    for name, theirs in real.families.items():
        mine = ours.families[name]
        assert mine.flags == theirs.flags, name
        assert mine.columns == theirs.columns, name
        assert mine.path.parts[-2:] == theirs.path.parts[-2:], name


@pytest.mark.parametrize("date", TREES)
def test_the_same_comparison_of_wrong_values(date: str, tmp_path: Path) -> None:
    """AITER's own checkAllclose, as its mp_tuner calls it with --verbose: an exception, or a returned error."""
    torch = pytest.importorskip("torch")
    check = _comparison(TREES[date].commit, {"torch": torch, "logger": logging.getLogger("aiter")})
    strict = {"catastrophic_check": True} if "catastrophic_check" in inspecting.signature(check).parameters else {}
    right = torch.ones(64, 64)
    if TREES[date].new:
        with pytest.raises(AssertionError, match="catastrophic error"):
            check(right, right * 3, printLog=True, **strict)
    else:
        assert float(check(right, right * 3, printLog=True, **strict)) == 1.0
    ours = make_tree(tmp_path, date).root / "aiter/utility/mp_tuner.py"
    assert ("catastrophic error" in ours.read_text()) == TREES[date].new


def _comparison(commit: str, names: dict[str, Any]) -> Any:
    """checkAllclose of a commit, with what it needs of its file and no more."""
    body = ast.parse(show(commit, "aiter/test_common.py")).body
    wanted: list[ast.stmt] = [n for n in body if isinstance(n, (ast.Assign, ast.FunctionDef))]
    exec(compile(ast.Module(wanted, []), commit, "exec"), names)
    return names["checkAllclose"]
