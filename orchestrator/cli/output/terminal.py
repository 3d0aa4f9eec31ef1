"""Console, tables and safe text of the command line, and the table of a plan."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from worker.text import plural, uncoloured

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from orchestrator.planning import Plan
    from orchestrator.shapes import Shape
    from worker.families import Family

MOST_ROWS = 40
MOST_CHARACTERS = 10_000
"""Characters of a sentence: room for a node's detail (2,000) and for a command with the longest path (4,096)."""


def plain(text: str, limit: int = MOST_CHARACTERS) -> str:
    """Return text from a node made safe for a terminal: without escape sequences and control characters, cut.

    Give a `limit` only for names and cells. A sentence may end with a command that the user is told to type.
    """
    line = uncoloured(text).replace("\t", " ").strip()
    clean = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)
    return clean if len(clean) <= limit else clean[: limit - 3] + "..."


def console() -> Console:
    """Return a console on standard output; wide where that is no terminal, so that nothing is cut in a file."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=160, no_color=True, highlight=False)


def table(*columns: str, right: Sequence[str] = ()) -> Table:
    """Return an empty table without lines; `right`: columns aligned right."""
    from rich.table import Table

    t = Table(box=None, header_style="bold", padding=(0, 1))
    for c in columns:
        t.add_column(c, justify="right" if c in right else "left", no_wrap=True)
    return t


def plan_table(plan: Plan, family: Family, shapes: Sequence[Shape]) -> None:
    """Print the work by shared key with its cost, then the slots of each node."""
    keys = {s.id: s.key_dict(family) for s in shapes}
    from orchestrator.planning import seconds_of

    out = console()
    t = table("shapes", family.m_column, "shared key", "cost", "", right=("shapes", "cost"))
    rows = [[i for unit in w.units for i in unit] for w in plan.work]
    everywhere = _constant([keys[ids[0]] for ids in rows])
    for w, ids in [*zip(plan.work, rows, strict=True)][:MOST_ROWS]:
        sizes = [int(keys[i][family.m_column]) for i in ids]
        shared = " ".join(f"{k}={v}" for k, v in keys[ids[0]].items() if k not in (family.m_column, *everywhere))
        span = str(sizes[0]) if len(sizes) == 1 else f"{min(sizes)}..{max(sizes)}"
        t.add_row(str(len(sizes)), span, shared, f"{seconds_of(w):.1f} s", "each alone" if w.alone else "")
    out.print(t)
    if len(rows) > MOST_ROWS:
        out.print(f"... and {plural(len(rows) - MOST_ROWS, 'more row')} (all with --json)")
    if everywhere:
        out.print(f"everywhere: {' '.join(f'{k}={v}' for k, v in everywhere.items())}", highlight=False)
    n = table("node", "slots", right=("slots",))
    for node, slots in plan.nodes.items():
        n.add_row(node, str(slots))
    out.print(n)
    out.print(f"cost: {plan.cost_source}")


def _constant(keys: Sequence[Mapping[str, int | str]]) -> dict[str, int | str]:
    """Return the text columns with the same value in all keys."""
    return {k: v for k, v in keys[0].items() if isinstance(v, str) and all(o[k] == v for o in keys)} if keys else {}
