"""The worker's tuner `bench`: every backend on every shape of a group, interleaved on this slot's device.

It computes nothing itself: each backend has a process of its own (runner.py), so that a fault costs that process
and one row. A shape goes like this: every backend is prepared (inputs, one call, comparison with float32), then come
rounds, each one run of every backend in an order drawn anew (worker/protocol/bench.py). One row a run, saved when it
exists; where a backend has no result, one row with the reason. The shape's result is its fastest backend.
"""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.aiter_tree.locate import imported_package
from worker.bench.runner import BackendRunner, Refused
from worker.device.probe import identify
from worker.families import FAMILIES
from worker.protocol import NodePaths, Row, Spec, SpecShape
from worker.protocol.bench import Env, Options, fetch, mean_of_runs, rounds
from worker.tuners.aiter.environment import Chip, chip_of, inventory_switches, link_shipped_modules
from worker.tuners.base import Emit, Place
from worker.tuners.common.rows import figure

QUIET_SHARE = 0.8
"""Share of the agent's watchdog: what hangs is ended by us first, for we know which backend it is."""
PROBE = ""
"""The runner without a backend: what the environment is, and the canary."""


class BenchTuner:
    """Holds the processes between groups; `configure` gives the options, a spec's own come on top."""

    def __init__(self) -> None:
        self._place = Place()
        self._raw: dict[str, Any] = {}
        self._held: dict[tuple[str, str], BackendRunner] = {}
        self._device: dict[str, Any] = {}
        self._spec_options: dict[str, Any] = {}
        self._own: dict[str, Any] = {}
        self._usual: tuple[str, ...] = ("torch",)
        """The backends of a bench that names none."""

    def configure(self, options: Mapping[str, Any], place: Place) -> None:
        self._place = place
        self._raw = self._whole(options)
        Options.parse(self._raw)

    def open(self) -> dict[str, Any]:
        """Probe every environment: gfx, cu_num and device of the first that knows, `stacks` of all.

        Backends are started here, not by the first shape: their imports take seconds that no shape should be charged.
        """
        options = Options.parse(self._raw)
        stacks: dict[str, Any] = {}
        for env in options.envs:
            probe = self._runner(env, PROBE, options, "")
            try:
                probe.ready(240.0, lambda: None)
            except Refused as e:
                probe.facts = {**probe.facts, "unavailable": str(e)}
            stacks[env.name or "here"] = {**probe.facts, "python_path": env.python, **_given(env, options)}
        if any(f.get("has_aiter") for f in stacks.values()):
            self._usual = ("aiter-triton", "aiter-gluon")
        known = next((f for f in stacks.values() if f.get("gfx")), None)
        self._device = known or identify()
        short = {k: self._device[k] for k in ("gfx", "cu_num", "device") if k in self._device}
        for env in options.envs:
            for name in options.backends or self._usual:
                if not name.startswith("aiter"):  # which waits for the family
                    with contextlib.suppress(Refused):  # its rows will have the reason
                        self._runner(env, name, options, "").ready(240.0, lambda: None)
        return {**short, "bench": stacks}

    def canary(self) -> tuple[bool, float, str]:
        """The torch tuner's, in the first environment that has torch. Without any, no backend has a result either."""
        for runner in list(self._held.values()):
            if runner.name == PROBE and not runner.gone:
                try:
                    answer = runner.ready(60.0, lambda: None).ask({"do": "canary"}, 100.0, lambda: None)
                except Exception as e:  # noqa: BLE001 - whatever ends it is a failed canary
                    return False, -1.0, str(e)
                finally:
                    runner.close()
                if answer["is"] != "canary":
                    return False, -1.0, str(answer.get("detail", ""))
                return bool(answer["ok"]), float(answer["us"]), str(answer["detail"])
        return True, 0.0, "no environment has torch: nothing was multiplied"

    def tune(self, spec: Spec, emit: Emit) -> dict[str, float]:
        """Bench the shapes of a spec. Raises ValueError for bad options."""
        began = time.perf_counter()
        if spec.options != self._spec_options:
            self._spec_options, self._own = dict(spec.options), self._whole(spec.options)
        options = Options.parse({**self._raw, **self._own})
        try:
            for shape in spec.shapes:
                self._shape(spec, shape, options, emit)
        except BaseException:
            self.close()
            raise
        return {"measure": round(time.perf_counter() - began, 6)}

    def close(self) -> None:
        """End all processes."""
        for runner in self._held.values():
            runner.close()
        self._held.clear()

    def _whole(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options with the texts that are stored on the node."""
        return fetch(options, NodePaths(self._place.node_dir or Path.cwd()).texts)

    def _shape(self, spec: Spec, shape: SpecShape, options: Options, emit: Emit) -> None:
        emit.started(shape.id)
        quiet_s = QUIET_SHARE * spec.watchdog_s
        facts: dict[BackendRunner, CaseFacts] = {}
        refused: list[Row] = []

        def fail(who: BackendRunner, e: Refused) -> None:
            row = failed_row(who.env.name, who.name, e.status, str(e), options.timer, facts.pop(who, None))
            refused.append(row)
            emit.row(shape.id, row)

        for env in options.envs:
            for name in options.backends or self._usual:
                who = self._runner(env, name, options, spec.family)
                try:
                    answer = who.prepare(spec.family, shape.key, spec.err_ratio, quiet_s, emit.alive)
                    if not answer["timed"]:
                        raise Refused("untimed", f"{answer['detail']} (its result is right)")
                    facts[who] = CaseFacts.of(answer)
                except Refused as e:
                    fail(who, e)
        taken = self._rounds(shape, options, facts, fail, quiet_s, emit)
        for who in facts:
            who.drop(emit.alive)
        if taken:
            best = min(taken, key=lambda w: mean_of_runs(taken[w], options.rule).us)
            emit.tuned(shape.id, mean_row(best.env.name, best.name, taken[best], options, facts[best]))
            return
        reason = "wrong_result" if any(r["status"] == "wrong" for r in refused) else "no_candidate"
        if all(r["status"] in ("unavailable", "unsupported") for r in refused):
            reason = "unsupported"
        reasons = "; ".join(f"{r['libtype']}: {r['status']}: {r['detail']}" for r in refused)
        emit.failed(shape.id, reason, f"no backend has a number: {reasons}"[:1500])

    def _rounds(
        self,
        shape: SpecShape,
        options: Options,
        facts: dict[BackendRunner, CaseFacts],
        fail: Any,
        quiet_s: float,
        emit: Emit,
    ) -> dict[BackendRunner, list[float]]:
        """Runs in microseconds of every backend that has at least one and no fault."""
        taken: dict[BackendRunner, list[float]] = {who: [] for who in facts}
        pairs = {who: who.name for who in facts}
        rng = random.Random(f"{options.seed} {shape.key} {options.first}")
        for order in rounds(taken, pairs, options.rule, rng):
            for who in order:
                try:
                    answer = who.sample(quiet_s, emit.alive)
                except Refused as e:
                    del taken[who]
                    fail(who, e)
                    continue
                taken[who].append(float(answer["us"]))
                number = options.first + len(taken[who])
                emit.row(shape.id, run_row(who.env.name, who.name, number, answer, options.timer, facts[who]))
        return {who: values for who, values in taken.items() if values}

    def _runner(self, env: Env, name: str, options: Options, family: str) -> BackendRunner:
        """The runner of this backend and environment, made if there is none."""
        at = (env.name, name)
        if at not in self._held:
            label = "-".join(p for p in (env.name, name or "probe") if p)
            folder = (self._place.node_dir or Path.cwd()).absolute() / "bench" / self._place.slot / label
            folder.mkdir(parents=True, exist_ok=True)
            raw = {k: v for k, v in self._raw.items() if k not in ("envs", "table", "configs")}
            if env.name in options.configs and name != PROBE:
                raw["configs"] = {env.name: options.configs[env.name]}
            variables = {**_variables(name, folder, options, family, env, chip_of(self._device)), **env.variables}
            self._held[at] = BackendRunner(env, name, folder, options, raw, variables)
        return self._held[at]


def _given(env: Env, options: Options) -> dict[str, Any]:
    """Fields of a stack that were requested: its variables, and its config set in words."""
    out: dict[str, Any] = {"variables": dict(env.variables)} if env.variables else {}
    if env.name in options.configs:
        text = options.configs[env.name]
        out["configs"] = json.loads(text)["named"] if text else "the tree's own"
    return out


def _variables(name: str, folder: Path, options: Options, family: str, env: Env, chip: Chip) -> dict[str, str]:
    """Environment variables of a backend's process: folders of its own, and the table in force."""
    out = {"TRITON_CACHE_DIR": str(folder / "triton")} if name else {}
    if not name.startswith("aiter"):
        return out
    jit = folder / "jit"
    (jit / "build").mkdir(parents=True, exist_ok=True)
    package = imported_package() if not env.python else None
    if package is not None:
        link_shipped_modules(jit, package)
    out |= {"AITER_JIT_DIR": str(jit), **chip.variables(), **inventory_switches()}
    if name == "aiter":
        out["AITER_LOG_TUNED_CONFIG"] = "1"  # the log says which row served a shape
        if options.table and family in FAMILIES:
            table = folder / FAMILIES[family].tuned_csv
            table.write_text(options.table)
            out[FAMILIES[family].env] = str(table)
    return out


@dataclass(frozen=True, slots=True)
class CaseFacts:
    """Answer of a backend to the preparation of a shape."""

    op: str
    kernel: str
    err: float
    flops: float
    bytes: float
    detail: str = ""
    config: str = ""

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> CaseFacts:
        err, flops, size = (float(answer[n]) for n in ("err", "flops", "bytes"))
        words = (str(answer.get(n, "")) for n in ("detail", "config"))
        return cls(str(answer["op"]), str(answer["kernel"]), err, flops, size, *words)


def run_row(env: str, backend: str, run: int, answer: Mapping[str, Any], timer: str, facts: CaseFacts) -> Row:
    """Row of one run."""
    kernel = str(answer.get("kernel") or facts.kernel)
    about = Row(
        run=run, status="ok", spread=round(float(answer["spread"]), 4), samples=int(answer["samples"]),
        detail=facts.detail,
    )  # fmt: skip
    return {**_row(env, backend, kernel, float(answer["us"]), timer, facts), **about}


def failed_row(env: str, backend: str, status: str, detail: str, timer: str, facts: CaseFacts | None) -> Row:
    """Row of a backend without a result for the shape."""
    about = Row(run=0, status=status, spread=0.0, samples=0, detail=detail[:1500])
    return {**_row(env, backend, facts.kernel if facts else backend, -1.0, timer, facts), **about}


def mean_row(env: str, backend: str, values: Sequence[float], options: Options, facts: CaseFacts) -> Row:
    """Row of a shape's result: its fastest backend with the mean of its runs."""
    found = mean_of_runs(values, options.rule)
    detail = f"mean of {found.used} of {found.taken} runs{'' if found.status == 'ok' else ', ' + found.status}"
    about = Row(run=0, status="ok", spread=round(found.spread, 4), samples=found.taken, detail=detail)
    return {**_row(env, backend, facts.kernel, found.us, options.timer, facts), **about}


def _row(env: str, backend: str, kernel: str, us: float, timer: str, facts: CaseFacts | None) -> Row:
    measured = us > 0 and facts is not None
    return Row(
        kernelId=0,
        splitK=0,
        us=round(us, 4),
        kernelName=kernel[:900] or backend,
        libtype=backend,
        tflops=figure(facts.flops / us / 1e6) if measured and facts else 0.0,
        bw=figure(facts.bytes / us / 1e3) if measured and facts else 0.0,
        errRatio=min(1.0, facts.err) if facts else 1.0,
        env=env,
        op=facts.op if facts else "",
        timer=timer,
        aiter_config=facts.config if facts else "",
    )
