"""A record of the journal is interpreted in one place: few modules know its name."""

from __future__ import annotations

import ast
from collections import defaultdict

from orchestrator.events import RECORD_TYPES
from tests.paths import ROOT

MOST = 5
"""Modules that name a record: its definition, `apply`, what makes it, and at most two that carry it out or read it."""


def test_a_record_is_named_in_few_modules() -> None:
    named: dict[str, set[str]] = defaultdict(set)
    for path in (ROOT / "orchestrator").rglob("*.py"):
        module = str(path.relative_to(ROOT))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "orchestrator.events":
                for alias in node.names:
                    named[alias.name].add(module)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ev":
                named[node.attr].add(module)
    for name in RECORD_TYPES:
        known = {*named[name], "orchestrator/events.py"}
        assert "orchestrator/policy/apply.py" in known, f"{name}: nothing applies it"
        assert len(known) <= MOST, f"{name} is named in {sorted(known)}"
