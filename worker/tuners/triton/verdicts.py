"""What a search says in the end, in words: how the ranking went, or why nobody may win. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from worker.protocol import Row
from worker.text import plural
from worker.tuners.triton import messages as say
from worker.tuners.triton.candidate import Candidate
from worker.tuners.triton.problem import Problem


def group_name(p: Problem) -> str:
    """A problem's group as text: all but M."""
    return "/".join(str(part) for part in p.group_key)


def story(candidates: Sequence[Candidate], ranked: say.Ranked, tried: int) -> str:
    """How the ranking went, in words."""
    v = ranked.verdict
    others = sorted(
        (v.us[i], c.name + (" (tied)" if i in v.tied else "")) for i, c in enumerate(candidates) if i != v.winner
    )
    text = f"best of {tried}; ranked {len(candidates)} in {v.rounds} rounds"
    if ranked.held:
        text += f", {plural(ranked.held, 'sample')} dropped (clock held)"
    return text + (": next " + ", ".join(f"{name} {us:.4g} us" for us, name in others) if others else "")


def verdict(rows: Sequence[Row], limit: float) -> tuple[str, str]:
    """Reason and detail for a shape of whose candidates none may win."""
    by = {s: [r for r in rows if r["status"] == s] for s in ("wrong", "unsupported", "oom", "error", "timeout")}
    counts = ", ".join(f"{len(v)} {s}" for s, v in by.items() if v)
    if by["wrong"]:
        least = min(r["errRatio"] for r in by["wrong"])
        detail = f"of {plural(len(rows), 'candidate')}: {counts}; the least errRatio is {least:g}, the limit {limit:g}"
        return "wrong_result", detail
    reason = "unsupported" if rows and len(by["unsupported"]) == len(rows) else "no_candidate"
    first = f"; {rows[0]['kernelName']}: {rows[0]['detail']}" if rows else ""
    return reason, f"of {plural(len(rows), 'candidate')}: {counts or 'none ran'}{first}"
