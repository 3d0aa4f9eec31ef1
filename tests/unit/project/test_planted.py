"""The list of planted bugs is true: each can be planted, and the tests that must catch it are there."""

from __future__ import annotations

import ast
from collections import Counter

from tests.paths import ROOT
from tests.planted.bugs import BUGS, LAWS


def test_there_are_forty_and_at_least_two_for_each_law() -> None:
    laws = Counter(b.law for b in BUGS)
    assert len({b.name for b in BUGS}) == len(BUGS) >= 40
    assert (laws.keys(), min(laws.values()) >= 2) == (LAWS.keys(), True)


def test_each_can_be_planted_and_its_tests_are_there() -> None:
    for bug in BUGS:
        text = (ROOT / bug.file).read_text()
        assert text.count(bug.old) == 1, f"{bug.name}: {bug.file} must have the old text exactly once"
        if bug.file.endswith(".py"):
            ast.parse(text.replace(bug.old, bug.new))
        for test in bug.tests:
            path, _, name = test.partition("::")
            there = (ROOT / path).is_file() and (not name or f"def {name}(" in (ROOT / path).read_text())
            assert there, f"{test} is gone: name the tests that hold law {bug.law} now"
