"""Every place that the page of known issues names is there at every version that it names, and its issue finds it."""

from __future__ import annotations

import ast
import re

import pytest

from tests.aiter.checkout import AITER_GIT, VERSIONS, needs_checkout, show
from tests.support.known_issues_page import UpstreamSource, sources
from worker.text import clean
from worker.tuners.aiter.known_issues import ISSUES, KnownIssue

pytestmark = needs_checkout

FILL = ("0", "-6", "7", "/some/path", "('gfx950', 256, 64, 256, 384)", "gfx942", "module_x")
NAMES = list(VERSIONS)
CLAIMS = [
    pytest.param(p, s, v, id=f"{p.name}-{s.path.rsplit('/', 1)[-1]}-{i}-{v}")
    for p in (ISSUES if AITER_GIT else ())
    for i, s in enumerate(sources().get(p.name, ()))
    for v in NAMES[NAMES.index(s.since) : NAMES.index(s.until) + 1]
]


def literals(text: str) -> list[str]:
    """The string literals of a Python file, with {} for what is filled in; those of one print() joined."""
    out: list[str] = []
    joined: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print" and len(node.args) > 1:
            joined.update(map(id, node.args))
            out.append(" ".join(_literal(a) or "{}" for a in node.args))
        elif id(node) not in joined and (found := _literal(node)) is not None:
            out.append(found)
    return out


def _literal(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(n.value) if isinstance(n, ast.Constant) else "{}" for n in node.values)
    return None


def c_literals(text: str) -> list[str]:
    """The same of a C++ file: the literals of a statement joined, printf's fields as {}."""
    out = []
    for run in re.findall(r'"(?:[^"\\\n]|\\.)*"(?:[\s\\]*(?:#\w+)?[\s\\]*"(?:[^"\\\n]|\\.)*")*', text):
        parts = re.findall(r'"((?:[^"\\\n]|\\.)*)"', re.sub(r'"([\s\\]*)#\w+', '""{}"', run))
        out.append(re.sub(r"%[-\d.]*[a-z]+", "{}", "".join(parts)))
    return out


@pytest.mark.parametrize(("issue", "source", "version"), CLAIMS)
def test_source(issue: KnownIssue, source: UpstreamSource, version: str) -> None:
    text = show(version, source.path)
    if source.verb == "has":
        assert source.says in text
        return
    found = [x for x in (literals if source.path.endswith(".py") else c_literals)(text) if source.says in x]
    assert found, f"{source.path} at {version} does not print {source.says!r}"
    for whole in found:
        printed = [clean(re.sub(r"\{\}", lambda _, fill=fill: fill, whole), 4000) for fill in FILL]  # type: ignore[misc]
        assert any(issue.search(line) for line in printed), f"{issue.name} does not find {whole!r}"
