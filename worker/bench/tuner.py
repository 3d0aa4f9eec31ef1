"""The worker's tuner `bench`: every backend on every side and shape of a group, interleaved on this slot's device.

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
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from worker.aiter_tree.locate import imported_package
from worker.bench.runner import BackendRunner
from worker.device import identify
from worker.families import FAMILIES
from worker.protocol import NodePaths, Row, Spec, SpecShape
from worker.protocol.bench import HARMLESS, Options, Side, fetch, mean_of_runs, rounds
from worker.tuners.aiter.environment import chip_variables, inventory_switches
from worker.tuners.aiter.modules import link_shipped_modules
from worker.tuners.base import Emit, Place
from worker.tuners.common.helper_process import HelperError
from worker.tuners.common.problem import figure

QUIET_SHARE = 0.8
"""Share of the agent's watchdog: what hangs is ended by us first, for we know which backend it is."""
PROBE = ""
"""The runner without a backend: it describes the side, and runs the canary."""


class BenchTuner:
    """Holds the processes between groups; `configure` gives the options, a spec's own come on top."""

    def __init__(self) -> None:
        self._place = Place()
        self._raw: dict[str, Any] = {}
        self._held: dict[tuple[str, str], BackendRunner] = {}
        self._device: dict[str, Any] = {}
        self._usual: tuple[str, ...] = ("torch",)
        """The backends of a bench that names none."""

    def configure(self, options: Mapping[str, Any], place: Place) -> None:
        self._place = place
        self._raw = self._whole(options)
        Options.parse(self._raw)

    def open(self) -> dict[str, Any]:
        """Probe every side: gfx, cu_num and device of the first that knows, `bench` of all.

        Backends are started here, not by the first shape: their imports take seconds that no shape should be charged.
        """
        options = Options.parse(self._raw)
        stacks: dict[str, Any] = {}
        for side in options.sides:
            probe = self._runner(side, PROBE, options, "")
            with contextlib.suppress(HelperError):
                probe.start()
            stacks[side.name or "here"] = {**probe.facts, "python_path": side.python, **_given(side)}
            if probe.gone:
                stacks[side.name or "here"]["unavailable"] = probe.gone
        if any(f.get("has_aiter") for f in stacks.values()):
            self._usual = ("aiter-triton", "aiter-gluon")
        self._device = next((f for f in stacks.values() if f.get("gfx")), {}) or identify()
        for side in options.sides:
            for name in options.backends or self._usual:
                if not name.startswith("aiter"):  # which waits for the family
                    with contextlib.suppress(HelperError):  # its rows will have the reason
                        self._runner(side, name, options, "").start()
        return {**{k: self._device[k] for k in ("gfx", "cu_num", "device") if k in self._device}, "bench": stacks}

    def canary(self) -> tuple[bool, float, str]:
        """The torch tuner's, on the first side that has torch. Without any, no backend has a result either."""
        for runner in self._held.values():
            if runner.name == PROBE and not runner.gone:
                try:
                    answer = runner.ask({"do": "canary"}, 100.0)
                except HelperError as e:
                    return False, -1.0, str(e)
                finally:
                    runner.close()
                return bool(answer["ok"]), float(answer["us"]), str(answer["detail"])
        return True, 0.0, "no side has torch: nothing was multiplied"

    def tune(self, spec: Spec, emit: Emit) -> dict[str, float]:
        """Bench the shapes of a spec. Raises ValueError for bad options."""
        began = time.perf_counter()
        options = Options.parse({**self._raw, **self._whole(spec.options)})
        try:
            for shape in spec.shapes:
                self._measure_shape(spec, shape, options, emit)
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

    def _measure_shape(self, spec: Spec, shape: SpecShape, options: Options, emit: Emit) -> None:
        emit.started(shape.id)
        bench = ShapeBench(spec, shape, options, emit)
        for side in options.sides:
            for name in options.backends or self._usual:
                bench.prepare(self._runner(side, name, options, spec.family))
        bench.measure()
        bench.report()

    def _runner(self, side: Side, name: str, options: Options, family: str) -> BackendRunner:
        """Return the runner of this backend and side."""
        at = (side.name, name)
        if at not in self._held:
            label = "-".join(p for p in (side.name, name or "probe") if p)
            folder = (self._place.node_dir or Path.cwd()).absolute() / "bench" / self._place.slot / label
            folder.mkdir(parents=True, exist_ok=True)
            sides = [asdict(side if name else replace(side, configs=None))]
            raw = {**{k: v for k, v in self._raw.items() if k != "table"}, "sides": sides}
            variables = {**_variables(name, folder, options, family, side, self._device), **side.variables}
            self._held[at] = BackendRunner(side, name, folder, options, raw, variables)
        return self._held[at]


class ShapeBench:
    """The bench of one shape: every backend is prepared, all are measured in rounds, and the fastest is reported.

    A backend that cannot go on gets a row with the reason, and takes no further part.
    """

    def __init__(self, spec: Spec, shape: SpecShape, options: Options, emit: Emit) -> None:
        self._spec, self._shape, self._options, self._emit = spec, shape, options, emit
        self._quiet_s = QUIET_SHARE * spec.watchdog_s
        self._prepared: dict[BackendRunner, Mapping[str, Any]] = {}
        """The answer of each backend to the preparation of the shape."""
        self._times_us: dict[BackendRunner, list[float]] = {}
        """The times of each backend's runs so far."""
        self._refused: list[Row] = []

    def prepare(self, runner: BackendRunner) -> None:
        """Make the backend's inputs, and compare its result with float32."""
        key, err_ratio = self._shape.key, self._spec.err_ratio
        try:
            answer = runner.prepare(self._spec.family, key, err_ratio, self._quiet_s, self._emit.alive)
        except HelperError as e:
            self._refuse(runner, e)
            return
        self._prepared[runner] = answer
        self._times_us[runner] = []

    def measure(self) -> None:
        """Measure all prepared backends in rounds, and free their memory."""
        options = self._options
        rng = random.Random(f"{options.seed} {self._shape.key} {options.first}")
        names = {runner: runner.name for runner in self._times_us}
        for order in rounds(self._times_us, names, options.rule, rng):
            for runner in order:
                self._measure_once(runner)
        for runner in self._prepared:
            runner.drop(self._emit.alive)

    def _measure_once(self, runner: BackendRunner) -> None:
        try:
            answer = runner.sample(self._quiet_s, self._emit.alive)
        except HelperError as e:
            self._refuse(runner, e)
            return
        us = float(answer["us"])
        times = self._times_us[runner]
        times.append(us)
        facts = {**self._prepared[runner], **answer}
        run = self._options.first + len(times)
        row = _row(runner, self._options, facts, us, answer["spread"], answer["samples"], run=run)
        self._emit.row(self._shape.id, row)

    def _refuse(self, runner: BackendRunner, e: HelperError) -> None:
        self._times_us.pop(runner, None)
        facts = self._prepared.pop(runner, None)
        row = _row(runner, self._options, facts, run=0, status=e.status, detail=str(e)[:1500])
        self._refused.append(row)
        self._emit.row(self._shape.id, row)

    def report(self) -> None:
        """Report the fastest backend as the shape's result, or why there is none."""
        if not self._times_us:
            self._report_failure()
            return
        means = {runner: mean_of_runs(times, self._options.rule) for runner, times in self._times_us.items()}
        best = min(means, key=lambda runner: means[runner].us)
        mean = means[best]
        detail = f"mean of {mean.used} of {mean.taken} runs"
        if mean.status != "ok":
            detail += f", {mean.status}"
        facts = self._prepared[best]
        row = _row(best, self._options, facts, mean.us, mean.spread, mean.taken, run=0, detail=detail)
        self._emit.tuned(self._shape.id, row)

    def _report_failure(self) -> None:
        statuses = {row["status"] for row in self._refused}
        if "wrong" in statuses:
            reason = "wrong_result"
        elif statuses - {*HARMLESS}:
            reason = "no_candidate"
        else:
            reason = "unsupported"
        reasons = "; ".join(f"{row['libtype']}: {row['status']}: {row['detail']}" for row in self._refused)
        self._emit.failed(self._shape.id, reason, f"no backend has a number: {reasons}"[:1500])


def _given(side: Side) -> dict[str, Any]:
    """Fields of a side that were requested: its image, its variables, and its config set in words."""
    given: dict[str, Any] = {"variables": dict(side.variables), "image": side.image}
    if side.configs is not None:
        given["configs"] = json.loads(side.configs)["named"] if side.configs else "the tree's own"
    return {name: value for name, value in given.items() if value}


def _variables(
    name: str, folder: Path, options: Options, family: str, side: Side, device: Mapping[str, Any]
) -> dict[str, str]:
    """Environment variables of a backend's process: folders of its own, and the table in force."""
    out = {"TRITON_CACHE_DIR": str(folder / "triton")} if name else {}
    if not name.startswith("aiter"):
        return out
    jit = folder / "jit"
    (jit / "build").mkdir(parents=True, exist_ok=True)
    if not side.python and (package := imported_package()):
        link_shipped_modules(jit, package)
    out |= {"AITER_JIT_DIR": str(jit), **chip_variables(device), **inventory_switches()}
    if name == "aiter":
        out["AITER_LOG_TUNED_CONFIG"] = "1"  # the log says which row served a shape
        if options.table and family in FAMILIES:
            table = folder / FAMILIES[family].tuned_csv
            table.write_text(options.table)
            out[FAMILIES[family].env] = str(table)
    return out


def _row(
    who: BackendRunner,
    options: Options,
    of: Mapping[str, Any] | None,
    us: float = -1.0,
    spread: float = 0.0,
    samples: int = 0,
    *,
    run: int,
    status: str = "ok",
    detail: str = "",
) -> Row:
    """Row of one run, of a result, or of a backend without one; `of`: its answer to the preparation of the shape."""
    of = of or {}
    return Row(
        kernelId=0,
        splitK=0,
        us=round(us, 4),
        kernelName=str(of.get("kernel") or who.name)[:900],
        libtype=who.name,
        tflops=figure(float(of["flops"]) / us / 1e6) if us > 0 else 0.0,
        bw=figure(float(of["bytes"]) / us / 1e3) if us > 0 else 0.0,
        errRatio=min(1.0, float(of.get("err", 1.0))),
        status=status,
        spread=round(spread, 4),
        samples=samples,
        detail=detail,
        env=who.side.name,
        op=str(of.get("op", "")),
        timer=options.timed,
        aiter_config=str(of.get("config", "")),
        run=run,
    )
