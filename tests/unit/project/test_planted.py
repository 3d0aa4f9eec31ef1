"""The list of planted bugs is true: each can be planted, and the tests that must catch it are there."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.planted.__main__ import plant
from tests.planted.bugs import BUGS, LAWS, Bug


def test_there_are_forty_and_at_least_two_for_each_law() -> None:
    assert len({b.name for b in BUGS}) == len(BUGS) >= 40
    laws = Counter(b.law for b in BUGS)
    assert laws.keys() == LAWS.keys()
    assert min(laws.values()) >= 2


@pytest.mark.parametrize("bug", BUGS, ids=lambda b: b.name)
def test_it_can_be_planted_and_its_tests_are_there(bug: Bug, tmp_path: Path) -> None:
    text = (ROOT / bug.file).read_text()
    assert text.count(bug.old) == 1, f"{bug.file} must have the old text exactly once"
    copy = tmp_path / bug.file
    copy.parent.mkdir(parents=True)
    copy.write_text(text)
    assert plant(bug, tmp_path)
    assert bug.new in copy.read_text() != text
    if bug.file.endswith(".py"):
        ast.parse(copy.read_text())
    for test in bug.tests:
        path, _, name = test.partition("::")
        source = ROOT / path
        assert source.is_file(), f"{path} is gone: name the tests that hold law {bug.law} now"
        assert f"def {name}(" in source.read_text() or not name, f"{test} is gone"
