"""What a bench measured, from its ledger: one result per shape, environment and backend. Pure but for the reading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.ledger.model import ProfileRow
from orchestrator.ledger.reader import LedgerReader
from worker.bench.options import BACKENDS, OWN
from worker.bench.repeats import Rule, verdict

MEASURED = ("ok", "unstable", "short")
"""Statuses with a number; `short`: interrupted before all runs were in."""
STANDARD = Rule()
HARMLESS = ("unavailable", "unsupported", "untimed")
"""No number, and nobody's fault."""


@dataclass(frozen=True, slots=True)
class Result:
    """A backend on a shape. `us` is the mean of the runs that agree, 0 where there is no number (`detail` says why).

    `spread` is (max - min) / mean of those runs, `samples` how many runs were taken; `runs` are (number, us) of all.
    """

    shape: int
    key: tuple[int | str, ...]
    env: str
    backend: str
    status: str
    us: float = 0.0
    tflops: float = 0.0
    bw: float = 0.0
    spread: float = 0.0
    samples: int = 0
    err: float | None = None
    op: str = ""
    kernel: str = ""
    timer: str = ""
    detail: str = ""
    node: str = ""
    slot: str = ""
    runs: tuple[tuple[int, float], ...] = ()

    @property
    def measured(self) -> bool:
        return self.status in MEASURED


def results(ledger: LedgerReader, rule: Rule = STANDARD) -> list[Result]:
    """All results, by shape, environment (as first heard of) and backend (as they are usually listed).

    Of a shape that was tried several times the settling attempt counts, else the last that has rows: runs of two
    attempts are never mixed.
    """
    settled = {s.id: s.attempt for s in ledger.shapes() if s.state == "tuned" and s.attempt}
    rows: dict[int, dict[str, list[ProfileRow]]] = {}
    for row in ledger.profile_rows():
        rows.setdefault(row.shape, {}).setdefault(row.attempt, []).append(row)
    out: list[Result] = []
    for shape in sorted(rows):
        attempts = rows[shape]
        mine = attempts.get(settled.get(shape, ""), attempts[list(attempts)[-1]])
        groups: dict[tuple[str, str], list[ProfileRow]] = {}
        for row in mine:
            backend = OWN if row.libtype == "triton" else row.libtype  # as runs before 0.2.0 called it
            groups.setdefault((str(row.extra.get("env", "")), backend), []).append(row)
        out += [_result(env, backend, found, rule) for (env, backend), found in groups.items()]
    envs = list(dict.fromkeys(r.env for r in out))
    return sorted(out, key=lambda r: (r.shape, envs.index(r.env), _place(r.backend)))


def rule_of(options: Mapping[str, Any]) -> Rule:
    """The rule that a run's options give."""
    names = ("runs", STANDARD.runs), ("extra", STANDARD.extra), ("within", STANDARD.within)
    return Rule(*(options.get(name, value) for name, value in names))


def fastest(found: Sequence[Result]) -> Mapping[tuple[int, str], Result]:
    """The fastest measured backend of each (shape, environment)."""
    best: dict[tuple[int, str], Result] = {}
    for r in found:
        at = (r.shape, r.env)
        if r.measured and (at not in best or r.us < best[at].us):
            best[at] = r
    return best


def combined(parts: Sequence[Result], rule: Rule) -> list[Result]:
    """Results of several passes over the same shapes as one; a pass without a number leaves none to the whole."""
    groups: dict[tuple[tuple[int | str, ...], str, str], list[Result]] = {}
    for r in parts:
        groups.setdefault((r.key, r.env, r.backend), []).append(r)
    numbers = {key: i for i, key in enumerate(dict.fromkeys(key for key, _, _ in groups), start=1)}
    out = []
    for (key, _, _), mine in groups.items():
        first = replace(mine[0], shape=numbers[key])
        bad = next((r for r in mine if not r.measured), None)
        if bad is not None:
            out.append(replace(bad, shape=numbers[key]))
            continue
        out.append(_judged(replace(first, runs=tuple(run for r in mine for run in r.runs)), rule))
    return sorted(out, key=lambda r: r.shape)


def exit_fault(found: Sequence[Result]) -> bool:
    """Whether something went wrong that is no mere absence: a fault, a wrong result, a hang."""
    return any(not r.measured and r.status not in HARMLESS for r in found)


def _place(backend: str) -> int:
    return BACKENDS.index(backend) if backend in BACKENDS else len(BACKENDS)


def _result(env: str, backend: str, rows: Sequence[ProfileRow], rule: Rule) -> Result:
    runs = {int(r.extra["run"]): r for r in rows if r.extra.get("run") and r.us > 0 and r.status == "ok"}
    bad = next((r for r in rows if r.status != "ok"), None)
    last = bad or rows[-1]
    common = Result(
        last.shape, last.key, env, backend, last.status, err=last.err_ratio, op=str(last.extra.get("op", "")),
        kernel=last.kernel_name, timer=str(last.extra.get("timer", "")), detail=last.detail, node=last.node,
        slot=last.slot, runs=tuple((n, runs[n].us) for n in sorted(runs)),
    )  # fmt: skip
    if bad is not None or not runs:
        return common if bad is not None else replace(common, status="short")
    one = next(iter(runs.values()))
    return _judged(replace(common, us=one.us, tflops=one.tflops or 0.0, bw=one.bw or 0.0), rule)


def _judged(r: Result, rule: Rule) -> Result:
    """With the verdict on its runs; `us`, `tflops` and `bw` are those of any one of them."""
    found = verdict([us for _, us in r.runs], rule)
    scale = r.us / found.us
    return replace(
        r, status=found.status, us=found.us, tflops=r.tflops * scale, bw=r.bw * scale, spread=found.spread,
        samples=found.taken,
    )  # fmt: skip
