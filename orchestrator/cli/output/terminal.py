"""Console, tables and safe text of the command line, and the table of a plan."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from orchestrator.view.words import duration
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
    """Print the groups with shared keys and cost, then the share of each node."""
    keys = {s.id: s.key_dict(family) for s in shapes}
    out = console()
    t = table("group", "shapes", family.m_column, "shared key", "cost", right=("shapes", "cost"))
    everywhere = _constant([keys[g.shapes[0]] for g in plan.groups])
    for g in plan.groups[:MOST_ROWS]:
        sizes = [int(keys[i][family.m_column]) for i in g.shapes]
        shared = " ".join(f"{k}={v}" for k, v in keys[g.shapes[0]].items() if k not in (family.m_column, *everywhere))
        span = str(sizes[0]) if len(sizes) == 1 else f"{min(sizes)}..{max(sizes)}"
        t.add_row(g.id, str(len(sizes)), span, shared, f"{g.cost_s:.1f} s")
    out.print(t)
    if len(plan.groups) > MOST_ROWS:
        out.print(f"... and {plural(len(plan.groups) - MOST_ROWS, 'more group')} (all with --json)")
    if everywhere:
        out.print(f"all groups: {' '.join(f'{k}={v}' for k, v in everywhere.items())}", highlight=False)
    n = table("node", "slots", "groups", "shapes", "work", right=("slots", "groups", "shapes", "work"))
    for share in plan.nodes:
        n.add_row(share.node, str(share.slots), str(share.groups), str(share.shapes), duration(share.cost_s))
    out.print(n)
    out.print(f"cost: {plan.cost_source}")


def _constant(keys: Sequence[Mapping[str, int | str]]) -> dict[str, int | str]:
    """Return the text columns with the same value in all keys."""
    return {k: v for k, v in keys[0].items() if isinstance(v, str) and all(o[k] == v for o in keys)} if keys else {}
