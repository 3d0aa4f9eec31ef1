"""Results of a bench from its rows, one per shape, side and backend, and its files in the run folder.

- bench.csv: a row per shape (and side), the runbook's columns first, then the other backends';
- bench_runs.csv: a row per run, long;
- NAME.csv and NAME.env.json for each side: the input of `compare`.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.families import AITERS
from orchestrator.files.cells import no_formula, utc
from orchestrator.files.write import write_atomic, write_csv
from orchestrator.ledger.reader import LedgerReader, ProfileRow, ShapeState
from orchestrator.paths import RunPaths
from orchestrator.tables.keys import best_by_key
from worker.families import BENCHED, Family
from worker.protocol.bench import HARMLESS, Rule, is_reference, mean_of_runs, with_texts

MEASURED = ("ok", "unstable", "short")
"""Statuses with a number; `short`: interrupted before all runs were in."""
RUNBOOK = ("M", "N", "K", "triton_tflops", "triton_us", "gluon_tflops", "gluon_us")
"""The columns of the runbook's fp4_triton_gluon_bench.csv; 0.0 where there is no number, as there."""
ENV_FORMAT = 1
_NAMES = {"torch": "torch_version", "triton": "triton_version", "aiter": "aiter_tree", "device": "gpu"}
"""The facts of a side, by the names of environment records (docs/reference/files.md)."""


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
    aiter_config: str = ""

    @property
    def measured(self) -> bool:
        return self.status in MEASURED


@dataclass(frozen=True, slots=True)
class BenchResults:
    """Findings of a bench: `stacks` are the facts of its sides by name, in the order of `--env` or `--config-set`
    (golden comes first); `total` shapes were asked for."""

    paths: RunPaths
    family: Family
    found: list[Result]
    stacks: Mapping[str, dict[str, Any]]
    total: int
    failed: Sequence[ShapeState] = ()

    @classmethod
    def of_run(cls, ledger: LedgerReader, paths: RunPaths, options: Mapping[str, Any]) -> BenchResults:
        """The results of a run as its ledger is now; `options`: those of the run."""
        names = [side["name"] for side in options.get("sides", ())]
        found = results(settled_rows(ledger), rule_of(options), names)
        return cls(paths, ledger.family, found, environments(ledger, names), ledger.counts().total, ledger.failed())

    @property
    def at_fault(self) -> bool:
        """True where a backend failed: a fault, a wrong result, a hang, and not a mere absence."""
        return any(not r.measured and r.status not in HARMLESS for r in self.found)

    @property
    def measured(self) -> int:
        """Shapes with a number."""
        return len({r.shape for r in self.found if r.measured})

    def write(self) -> None:
        """Write all files. Raises OSError."""
        _write(self.paths.bench, wide(self.found, self.family))
        _write(self.paths.bench_runs, long(self.found, self.family))
        measured = {r.env for r in self.found}
        for side, env in enumerate(self.stacks, 1):
            if env and env in measured:
                _write(self.paths.root / f"{env}.csv", compared(self.found, self.family, env))
                text = json.dumps(record(self.paths, env, side, self.stacks[env], self.found), indent=1) + "\n"
                write_atomic(self.paths.root / f"{env}.env.json", text)


def settled_rows(ledger: LedgerReader) -> list[ProfileRow]:
    """The rows that count. Of a shape that was tried several times the settling attempt counts, else the last that has
    rows: runs of two attempts are never mixed."""
    settled = {s.id: s.attempt for s in ledger.shapes() if s.state == "tuned" and s.attempt}
    rows: dict[int, dict[str, list[ProfileRow]]] = {}
    for row in ledger.profile_rows():
        rows.setdefault(row.shape, {}).setdefault(row.attempt, []).append(row)
    return [
        row for shape in sorted(rows) for row in rows[shape].get(settled.get(shape, ""), [*rows[shape].values()][-1])
    ]


def results(rows: Iterable[ProfileRow], rule: Rule, envs: Sequence[str]) -> list[Result]:
    """All results, by shape, side (in the order of `envs`) and backend (as they are usually listed).

    Rows of several passes are one result; a pass without a number leaves none to the whole.
    """
    groups: dict[tuple[tuple[int | str, ...], str, str], list[ProfileRow]] = {}
    for row in rows:
        groups.setdefault((row.key, str(row.row.get("env", "")), str(row.row["libtype"])), []).append(row)
    shapes = {key: i for i, key in enumerate(dict.fromkeys(key for key, _, _ in groups), start=1)}
    order = list(dict.fromkeys((*envs, *(env for _, env, _ in groups), *BENCHED)))
    out = [_result(shapes[key], env, backend, mine, rule) for (key, env, backend), mine in groups.items()]
    place = {backend: i for i, backend in enumerate(BENCHED)}
    return sorted(out, key=lambda r: (r.shape, order.index(r.env), place.get(r.backend, len(place))))


def _result(shape: int, env: str, backend: str, rows: Sequence[ProfileRow], rule: Rule) -> Result:
    runs = {int(r.row["run"]): r for r in rows if r.row.get("run") and r.us > 0 and r.status == "ok"}
    bad = next((r for r in rows if r.status != "ok"), None)
    last = bad or rows[-1]
    out = Result(
        shape, last.key, env, backend, last.status if bad else "short", err=last.row.get("errRatio"),
        op=str(last.row.get("op", "")), kernel=last.kernel_name, timer=str(last.row.get("timer", "")),
        detail=last.row["detail"], node=last.node, slot=last.slot, runs=tuple((n, runs[n].us) for n in sorted(runs)),
        aiter_config=str(last.row.get("aiter_config", "")),
    )  # fmt: skip
    if bad is not None or not runs:
        return out
    mean, one = mean_of_runs([us for _, us in out.runs], rule), next(iter(runs.values()))
    tflops, bw = (one.row.get(name, 0.0) * one.us / mean.us for name in ("tflops", "bw"))
    return replace(
        out, status=mean.status, us=mean.us, tflops=tflops, bw=bw, spread=mean.spread, samples=mean.taken
    )  # fmt: skip


def rule_of(options: Mapping[str, Any]) -> Rule:
    """The rule that a run's options give."""
    return Rule(**{name: options[name] for name in ("runs", "extra", "within") if name in options})


def fastest(found: Sequence[Result]) -> Mapping[tuple[int, str], Result]:
    """The fastest measured backend of each (shape, side)."""
    return best_by_key((r for r in found if r.measured), lambda r: (r.shape, r.env), lambda r: r.us)


def redacted(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a bench for the record: hashes in place of the text of files."""
    return with_texts(
        options, lambda text: text if is_reference(text) else f"sha256 {hashlib.sha256(text.encode()).hexdigest()}"
    )


def wide(found: Sequence[Result], family: Family) -> Iterable[Sequence[Any]]:
    """Header and rows of bench.csv.

    `triton_*` and `gluon_*` are AITER's, as in the guide. Every other backend has columns of its own name.
    """
    backends = list(dict.fromkeys(r.backend for r in found))
    names = {b: b for b in backends} | {owner: name for name, owner in AITERS.items()}
    numbers = [f"{b}_{unit}" for b in backends if b not in AITERS.values() for unit in ("tflops", "us")]
    about = [f"{names[b]}_{what}" for b in backends for what in ("spread", "samples", "status")]
    more = [*(c for c in family.key_names if c not in RUNBOOK), *(["env"] if any(r.env for r in found) else [])]
    header = [*RUNBOOK, *more, *numbers, *about, "fastest", "node"]
    absent = {c: 0 if c.endswith("_samples") else "" for c in header} | dict.fromkeys([*RUNBOOK[3:], *numbers], "0.0")
    won, rows = fastest(found), dict[tuple[int, str], dict[str, Any]]()
    for r in found:
        name, at = names[r.backend], (r.shape, r.env)
        row = rows.setdefault(at, dict(absent))
        row |= {**dict(zip(family.key_names, r.key, strict=True)), "env": r.env, "node": row["node"] or r.node}
        row |= {f"{name}_spread": f"{r.spread:.4f}", f"{name}_samples": r.samples, f"{name}_status": r.status}
        row["fastest"] = won[at].backend if at in won else ""
        if r.measured:
            tflops = f"{r.tflops:.1f}" if r.tflops >= 100 else f"{r.tflops:.4g}"
            row |= {f"{name}_tflops": tflops, f"{name}_us": f"{r.us:.4f}"}
    yield header
    yield from ([row[c] for c in header] for row in rows.values())


def long(found: Sequence[Result], family: Family) -> Iterable[Sequence[Any]]:
    """Header and rows of bench_runs.csv: a row per run; one of us 0 where a backend has none."""
    rest = [c for c in family.key_names if c not in ("M", "N", "K")]
    about = ("run", "env", "status", "op", "kernelName", "errRatio", "timer", "slot", "detail")
    yield ["M", "N", "K", "backend", "us", "tflops", "node", *rest, *about]
    for r in found:
        key = dict(zip(family.key_names, r.key, strict=True))
        for number, us in r.runs or ((0, 0.0),):
            tflops = family.flops(key) / us / 1e6 if us > 0 else 0.0
            yield [
                key["M"], key["N"], key["K"], r.backend, f"{us:.4f}", f"{tflops:.4f}", r.node, *(key[c] for c in rest),
                number, r.env, r.status, r.op, no_formula(r.kernel), "" if r.err is None else r.err, r.timer, r.slot,
                no_formula(r.detail),
            ]  # fmt: skip


def compared(found: Sequence[Result], family: Family, env: str) -> Iterable[Sequence[Any]]:
    """Header and rows of a side's file for `compare`: `kernel`, the key, `us`, `run`, of config sets also
    `aiter_config`; only what was measured.

    Equal `run` numbers of two sides were measured side by side.
    """
    mine = [r for r in found if r.env == env and r.measured]
    configs = any(r.aiter_config for r in mine)
    yield ["kernel", *family.key_names, "us", "run", *(["aiter_config"] if configs else [])]
    for r in mine:
        for number, us in r.runs:
            more = [no_formula(r.aiter_config)] if configs else []
            yield [f"{r.backend}/{r.op}", *r.key, f"{us:.4f}", number, *more]


def record(paths: RunPaths, env: str, side: int, stack: Mapping[str, Any], found: Sequence[Result]) -> dict[str, Any]:
    """Return the environment record of one side: measured in turn with the others of the same `session`.

    `side` is its number in the order of `--env`, from 1. `compare` refuses a golden side that came after the tot side.
    """
    mine = [r for r in found if r.env == env and r.measured]
    where = {n: " | ".join(sorted({str(getattr(r, n)) for r in mine})) for n in ("node", "slot", "timer")}
    left_out = ("hosts", "python_path", "image", "threads", "variables")
    facts = {_NAMES.get(n, n): v for n, v in stack.items() if n not in left_out}
    if given := stack.get("variables"):
        facts["switches"] = {**facts.get("switches", {}), **given}
        facts["under_test"] = " ".join(f"switches.{name}" for name in given)
    place = stack.get("image") or stack.get("python_path")
    named = f"{env} ({place})" if place else env
    head = {"format": ENV_FORMAT, "env": named, "captured": utc(time.time())}
    return {**head, "order": "interleaved", "session": paths.run, "side": side, **where, **facts}


def environments(ledger: LedgerReader, envs: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Return the versions of each environment by name, in the order of `envs`; `hosts`: slots it was measured on."""
    out: dict[str, dict[str, Any]] = {name: {"hosts": []} for name in envs}
    for slot in ledger.slots():
        for name, facts in (slot.device.get("bench") or {}).items():
            if isinstance(facts, dict):
                known = out.setdefault(str(name), {"hosts": []})
                known |= {n: value for n, value in facts.items() if n not in known}
                known["hosts"].append({"node": slot.node, "slot": slot.slot, "device": slot.device.get("device", "")})
    return out


def _write(path: Path, rows: Iterable[Sequence[Any]]) -> None:
    header, *rest = rows
    write_csv(path, header, rest)
