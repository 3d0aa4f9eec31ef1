"""Results of a bench from its ledger, one per shape, environment and backend, and its files in the run folder.

- bench.csv: a row per shape (and environment), the runbook's columns first, then the other backends';
- bench_runs.csv: a row per run, long;
- NAME.csv and NAME.env.json for each environment: the input of `compare`.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.ledger.model import ProfileRow
from orchestrator.ledger.reader import LedgerReader
from orchestrator.paths import RunPaths
from orchestrator.tables.backends import AITERS
from orchestrator.tables.write import no_formula, utc, write_csv
from orchestrator.userfiles import write_atomic
from worker.families import Family
from worker.families.backends import BENCHED
from worker.protocol.bench import TEXTS, Rule, is_reference, mean_of_runs
from worker.text import plural

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
    aiter_config: str = ""

    @property
    def measured(self) -> bool:
        return self.status in MEASURED


def results(ledger: LedgerReader, rule: Rule = STANDARD, envs: Sequence[str] = ()) -> list[Result]:
    """Return all results, by shape, environment (in the order of `envs`) and backend (as they are usually listed).

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
            groups.setdefault((str(row.row.get("env", "")), str(row.row["libtype"])), []).append(row)
        out += [_result(env, backend, found, rule) for (env, backend), found in groups.items()]
    order = list(dict.fromkeys((*envs, *(r.env for r in out))))
    return sorted(out, key=lambda r: (r.shape, order.index(r.env), _place(r.backend)))


def env_names(options: Mapping[str, Any]) -> list[str]:
    """Return the names of a run's environments, in the order of `--env` or `--config-set`: golden comes first."""
    return [env["name"] for env in options.get("envs", ())]


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
    """True where a backend failed: a fault, a wrong result, a hang, and not a mere absence."""
    return any(not r.measured and r.status not in HARMLESS for r in found)


def _place(backend: str) -> int:
    return BENCHED.index(backend) if backend in BENCHED else len(BENCHED)


def _result(env: str, backend: str, rows: Sequence[ProfileRow], rule: Rule) -> Result:
    runs = {int(r.row["run"]): r for r in rows if r.row.get("run") and r.us > 0 and r.status == "ok"}
    bad = next((r for r in rows if r.status != "ok"), None)
    last = bad or rows[-1]
    common = Result(
        last.shape, last.key, env, backend, last.status, err=last.row.get("errRatio"), op=str(last.row.get("op", "")),
        kernel=last.kernel_name, timer=str(last.row.get("timer", "")), detail=last.row["detail"], node=last.node,
        slot=last.slot, runs=tuple((n, runs[n].us) for n in sorted(runs)),
        aiter_config=str(last.row.get("aiter_config", "")),
    )  # fmt: skip
    if bad is not None or not runs:
        return common if bad is not None else replace(common, status="short")
    one = next(iter(runs.values()))
    return _judged(replace(common, us=one.us, tflops=one.row.get("tflops", 0.0), bw=one.row.get("bw", 0.0)), rule)


def _judged(r: Result, rule: Rule) -> Result:
    """The result with its runs judged; `us`, `tflops` and `bw` are those of any one run."""
    found = mean_of_runs([us for _, us in r.runs], rule)
    scale = r.us / found.us
    return replace(
        r, status=found.status, us=found.us, tflops=r.tflops * scale, bw=r.bw * scale, spread=found.spread,
        samples=found.taken,
    )  # fmt: skip


RUNBOOK = ("M", "N", "K", "triton_tflops", "triton_us", "gluon_tflops", "gluon_us")
"""The columns of the runbook's fp4_triton_gluon_bench.csv; 0.0 where there is no number, as there."""
LONG = ("backend", "us", "tflops", "node")
ENV_FORMAT = 1
INTERLEAVED = "interleaved"
_NAMES = {"torch": "torch_version", "triton": "triton_version", "aiter": "aiter_tree", "device": "gpu"}
"""The facts of a stack, by the names of environment records (docs/reference/files.md)."""


def write(ledger: LedgerReader, paths: RunPaths, options: Mapping[str, Any]) -> None:
    """Write all of them as the ledger is now; `options`: those of the run. Raises OSError."""
    envs = env_names(options)
    write_files(ledger.family, paths, results(ledger, rule_of(options), envs), environments(ledger, envs))


def redacted(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a bench for the record: hashes in place of the text of files."""
    out = dict(options)
    if out.get("table") and not is_reference(out["table"]):
        out["table"] = f"sha256 {_sha(out['table'])}, {plural(out['table'].count(chr(10)) - 1, 'row')}"
    for name in (n for n in TEXTS if out.get(n)):
        out[name] = {key: text if is_reference(text) else f"sha256 {_sha(text)}" for key, text in out[name].items()}
    return out


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def write_files(family: Family, paths: RunPaths, found: Sequence[Result], stacks: Mapping[str, dict[str, Any]]) -> None:
    """Write all of them; `stacks` are the environments in the order of `--env`. Raises OSError."""
    _write(paths.bench, wide(found, family))
    _write(paths.bench_runs, long(found, family))
    measured = {r.env for r in found}
    for side, env in enumerate(stacks, 1):
        if not env or env not in measured:
            continue
        _write(paths.root / f"{env}.csv", compared(found, family, env))
        text = json.dumps(record(paths, env, side, stacks[env], found), indent=1) + "\n"
        write_atomic(paths.root / f"{env}.env.json", text)


def wide(found: Sequence[Result], family: Family) -> Iterable[Sequence[Any]]:
    """Header and rows of bench.csv.

    `triton_*` and `gluon_*` are AITER's, as in the guide. Every other backend has columns of its own name.
    """
    import pandas as pd

    backends = list(dict.fromkeys(r.backend for r in found))
    names = {b: b for b in backends} | {owner: name for name, owner in AITERS.items()}
    numbers = [f"{b}_{unit}" for b in backends if b not in AITERS.values() for unit in ("tflops", "us")]
    about = [f"{names[b]}_{what}" for b in backends for what in ("spread", "samples", "status")]
    more = [*(c for c in family.key_names if c not in RUNBOOK), *(["env"] if any(r.env for r in found) else [])]
    header = [*RUNBOOK, *more, *numbers, *about, "fastest", "node"]
    best = fastest(found)
    rows = []
    for r in found:
        name, at = names[r.backend], (r.shape, r.env)
        row = {**dict(zip(family.key_names, r.key, strict=True)), "at": at, "env": r.env, "node": r.node}
        row |= dict(zip((f"{name}_tflops", f"{name}_us"), _numbers(r), strict=True))
        row |= {f"{name}_spread": f"{r.spread:.4f}", f"{name}_samples": r.samples, f"{name}_status": r.status}
        rows.append({**row, "fastest": best[at].backend if at in best else ""})
    frame = pd.DataFrame(rows, columns=pd.Index(["at", *header]), dtype=object).groupby("at", sort=False).first()
    absent = dict.fromkeys([*RUNBOOK[3:], *numbers], "0.0") | {c: 0 for c in about if c.endswith("_samples")}
    yield header
    yield from frame.fillna(absent).fillna("").itertuples(index=False, name=None)


def long(found: Sequence[Result], family: Family) -> Iterable[Sequence[Any]]:
    """Header and rows of bench_runs.csv: a row per run; one of us 0 where a backend has none."""
    rest = [c for c in family.key_names if c not in ("M", "N", "K")]
    about = ("run", "env", "status", "op", "kernelName", "errRatio", "timer", "slot", "detail")
    yield ["M", "N", "K", *LONG, *rest, *about]
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
    """Header and rows of an environment's file for `compare`: `kernel`, the key, `us`, `run`, of config sets also
    `aiter_config`; only what was measured.

    Equal `run` numbers of two environments were measured side by side.
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
    return {**head, "order": INTERLEAVED, "session": paths.run, "side": side, **where, **facts}


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


def _numbers(r: Result) -> list[str]:
    """tflops and us as the runbook has them; 0.0 where there is no number."""
    if not r.measured:
        return ["0.0", "0.0"]
    return [f"{r.tflops:.1f}" if r.tflops >= 100 else f"{r.tflops:.4g}", f"{r.us:.4f}"]


def _write(path: Path, rows: Iterable[Sequence[Any]]) -> None:
    header, *rest = rows
    write_csv(path, header, rest)
