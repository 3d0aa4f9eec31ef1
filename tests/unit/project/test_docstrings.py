"""House rule on docstrings: each begins with a noun or an imperative."""

from __future__ import annotations

import re

from tests.paths import ROOT

QUESTION = re.compile(r'\s*r?"""(What|Whether|How|Who|Whose|Which|Where|When|Why)\b')


def test_no_docstring_begins_with_a_question_word() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{n}: {line.strip()}"
        for folder in ("orchestrator", "worker", "benchmarks", "examples", "tests")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for n, line in enumerate(path.read_text().splitlines(), 1)
        if QUESTION.match(line)
    ]
    assert not found, "\n".join(["begin with a noun or an imperative:", *found])
