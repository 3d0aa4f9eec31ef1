"""The worker's tuner `bench`: every backend on every side and shape of a group, interleaved on this slot's device.

It computes nothing itself: each backend of each side has a process of its own (runner.py), so that a fault costs that
process and one row. The processes live until the tuner is closed or a spec breaks off.

For each shape, every backend is prepared (inputs, one call, comparison with float32). Then come rounds: each has one
run of every backend, in an order drawn anew (worker/protocol/bench.py). A row is sent for each run as soon as it is
measured, and one row with the reason for a backend without a result. The shape's result is its fastest backend.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from worker.aiter_tree.locate import imported_package
from worker.bench.config_set import set_name
from worker.bench.runner import BackendRunner
from worker.device import identify
from worker.families import FAMILIES
from worker.protocol import NodePaths, Row, Spec, SpecShape
from worker.protocol.bench import HARMLESS, BenchOptions, Side, draw_rounds, load_texts, mean_of_runs
from worker.tuners.aiter.environment import chip_variables, inventory_switches
from worker.tuners.aiter.modules import link_shipped_modules
from worker.tuners.base import Emit, Place
from worker.tuners.common.helper_process import HelperError
from worker.tuners.common.problem import figure

QUIET_SHARE = 0.8
"""Share of the agent's watchdog. We end a hanging process before the agent does: we know which backend it is."""
PROBE = ""
"""Name of the runner without a backend: it describes the side, and runs the canary."""
MAX_DETAIL = 1500
"""Characters of a reason that a row or a failure carries."""


class BenchTuner:
    """Holds the processes between groups; `configure` gives the options, a spec's own come on top."""

    def __init__(self) -> None:
        self._place = Place()
        self._options: dict[str, Any] = {}
        """The node's options, not parsed yet."""
        self._runners: dict[tuple[str, str], BackendRunner] = {}
        """By (side, backend)."""
        self._device: dict[str, Any] = {}
        """Facts on the device: gfx, cu_num, device."""
        self._default_backends: tuple[str, ...] = ("torch",)
        """The backends of a bench that names none."""

    def configure(self, options: Mapping[str, Any], place: Place) -> None:
        self._place = place
        self._options = self._with_texts(options)
        BenchOptions.parse(self._options)

    def open(self) -> dict[str, Any]:
        """Probe every side: gfx, cu_num and device of the first that knows, `bench` of all.

        Backends are started here, not by the first shape: their imports take seconds that no shape should be charged.
        """
        options = BenchOptions.parse(self._options)
        stacks = {side.name or "here": self._probe(side, options) for side in options.sides}
        if any(facts.get("has_aiter") for facts in stacks.values()):
            self._default_backends = ("aiter-triton", "aiter-gluon")
        known_devices = [facts for facts in stacks.values() if facts.get("gfx")]
        self._device = known_devices[0] if known_devices else identify()
        for side in options.sides:
            for name in options.backends or self._default_backends:
                if name.startswith("aiter"):
                    continue  # its variables depend on the family, which comes with the first shape
                with contextlib.suppress(HelperError):  # its rows will have the reason
                    self._runner(side, name, options, "").start()
        return {**{k: self._device[k] for k in ("gfx", "cu_num", "device") if k in self._device}, "bench": stacks}

    def _probe(self, side: Side, options: BenchOptions) -> dict[str, Any]:
        """Facts on a side: its software and device, what was requested for it, and why it is unavailable if it is."""
        probe = self._runner(side, PROBE, options, "")
        with contextlib.suppress(HelperError):
            probe.start()
        facts = {**probe.facts, "python_path": side.python}
        if side.variables:
            facts["variables"] = dict(side.variables)
        if side.image:
            facts["image"] = side.image
        if side.configs is not None:
            facts["configs"] = set_name(side.configs)
        if probe.gone:
            facts["unavailable"] = probe.gone
        return facts

    def canary(self) -> tuple[bool, float, str]:
        """The torch tuner's, on the first side that has torch. Without any, no backend has a result either. The probe
        ends with it; the next canary starts it again."""
        probes = (runner for runner in self._runners.values() if runner.name == PROBE and not runner.gone)
        probe = next(probes, None)
        if probe is None:
            return True, 0.0, "no side has torch: nothing was multiplied"
        try:
            answer = probe.ask({"do": "canary"}, 100.0)
        except HelperError as e:
            return False, -1.0, str(e)
        finally:
            probe.close()
        return bool(answer["ok"]), float(answer["us"]), str(answer["detail"])

    def tune(self, spec: Spec, emit: Emit) -> dict[str, float]:
        """Bench the shapes of a spec. Raises ValueError for bad options."""
        began = time.perf_counter()
        options = BenchOptions.parse({**self._options, **self._with_texts(spec.options)})
        try:
            for shape in spec.shapes:
                self._measure_shape(spec, shape, options, emit)
        except BaseException:
            self.close()
            raise
        return {"measure": round(time.perf_counter() - began, 6)}

    def close(self) -> None:
        """End all processes."""
        for runner in self._runners.values():
            runner.close()
        self._runners.clear()

    @property
    def _node_folder(self) -> Path:
        return self._place.node_dir or Path.cwd()

    def _with_texts(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options, with references replaced by the texts that are stored on the node."""
        return load_texts(options, NodePaths(self._node_folder).texts)

    def _measure_shape(self, spec: Spec, shape: SpecShape, options: BenchOptions, emit: Emit) -> None:
        emit.started(shape.id)
        bench = ShapeBench(spec, shape, options, emit)
        for side in options.sides:
            for name in options.backends or self._default_backends:
                bench.prepare(self._runner(side, name, options, spec.family))
        bench.measure()
        bench.report()

    def _runner(self, side: Side, name: str, options: BenchOptions, family: str) -> BackendRunner:
        """The runner of this backend and side. The first call makes it, and its options stay."""
        key = (side.name, name)
        if key not in self._runners:
            self._runners[key] = self._make_runner(side, name, options, family)
        return self._runners[key]

    def _make_runner(self, side: Side, name: str, options: BenchOptions, family: str) -> BackendRunner:
        label = "-".join(part for part in (side.name, name or "probe") if part)
        folder = self._node_folder.absolute() / "bench" / self._place.slot / label
        folder.mkdir(parents=True, exist_ok=True)
        variables = {**_variables(name, folder, options, family, side, self._device), **side.variables}
        sent_side = side if name else replace(side, configs=None)  # the probe reads no configs
        runner_options = {**self._options, "sides": [asdict(sent_side)]}
        runner_options.pop("table", None)  # it is a file, which a variable names
        return BackendRunner(side, name, folder, options, runner_options, variables)


class ShapeBench:
    """The bench of one shape: every backend is prepared, all are measured in rounds, and the fastest is reported.

    A backend that cannot go on gets a row with the reason, and takes no further part.
    """

    def __init__(self, spec: Spec, shape: SpecShape, options: BenchOptions, emit: Emit) -> None:
        self._spec = spec
        self._shape = shape
        self._options = options
        self._emit = emit
        self._quiet_s = QUIET_SHARE * spec.watchdog_s
        self._prepared: dict[BackendRunner, Mapping[str, Any]] = {}
        """The answer of each backend to the preparation of the shape."""
        self._times_us: dict[BackendRunner, list[float]] = {}
        """The times of each backend's runs so far."""
        self._refused: list[Row] = []

    def prepare(self, runner: BackendRunner) -> None:
        """Make the backend's inputs, and compare its result with float32."""
        spec = self._spec
        try:
            answer = runner.prepare(spec.family, self._shape.key, spec.err_ratio, self._quiet_s, self._emit.alive)
        except HelperError as e:
            self._refuse(runner, e)
            return
        self._prepared[runner] = answer
        self._times_us[runner] = []

    def measure(self) -> None:
        """Measure all prepared backends in rounds, and free their memory."""
        options = self._options
        rng = random.Random(f"{options.seed} {self._shape.key} {options.first}")
        pairs = {runner: runner.name for runner in self._times_us}
        for order in draw_rounds(self._times_us, pairs, options.rule, rng):
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
        times = self._times_us[runner]
        times.append(float(answer["us"]))
        facts = {**self._prepared[runner], **answer}
        row = _row(runner, self._options, facts, run=self._options.first + len(times))
        self._emit.row(self._shape.id, row)

    def _refuse(self, runner: BackendRunner, e: HelperError) -> None:
        self._times_us.pop(runner, None)
        facts = self._prepared.pop(runner, {})
        row = _row(runner, self._options, facts, status=e.status, detail=str(e)[:MAX_DETAIL])
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
        facts = {**self._prepared[best], "us": mean.us, "spread": mean.spread, "samples": mean.taken}
        row = _row(best, self._options, facts, detail=detail)
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
        self._emit.failed(self._shape.id, reason, f"no backend has a number: {reasons}"[:MAX_DETAIL])


def _variables(
    name: str, folder: Path, options: BenchOptions, family: str, side: Side, device: Mapping[str, Any]
) -> dict[str, str]:
    """Environment variables of a backend's process: folders of its own, and for the backend `aiter` the table in force.
    `name`: the backend's."""
    variables: dict[str, str] = {}
    if name:
        variables["TRITON_CACHE_DIR"] = str(folder / "triton")
    if not name.startswith("aiter"):
        return variables
    jit = folder / "jit"
    (jit / "build").mkdir(parents=True, exist_ok=True)
    package = None if side.python else imported_package()
    if package is not None:
        link_shipped_modules(jit, package)
    variables |= {"AITER_JIT_DIR": str(jit), **chip_variables(device), **inventory_switches()}
    if name != "aiter":
        return variables
    variables["AITER_LOG_TUNED_CONFIG"] = "1"  # the log says which row served a shape
    if options.table and family in FAMILIES:
        table = folder / FAMILIES[family].tuned_csv
        table.write_text(options.table)
        variables[FAMILIES[family].env] = str(table)
    return variables


def _row(
    runner: BackendRunner,
    options: BenchOptions,
    facts: Mapping[str, Any],
    *,
    run: int = 0,
    status: str = "ok",
    detail: str = "",
) -> Row:
    """Row of one run (numbered from 1), of a shape's result, or of a backend without a result (`run` is 0 for both).

    `facts`: the backend's answers for the shape, those to `prepare` and `sample` (child.py) in one; {} if it has none.
    """
    us = float(facts.get("us", -1.0))
    tflops = 0.0
    gigabytes_s = 0.0
    if us > 0:
        tflops = figure(float(facts["flops"]) / us / 1e6)
        gigabytes_s = figure(float(facts["bytes"]) / us / 1e3)
    return Row(
        kernelId=0,
        splitK=0,
        us=round(us, 4),
        kernelName=str(facts.get("kernel") or runner.name)[:900],
        libtype=runner.name,
        tflops=tflops,
        bw=gigabytes_s,
        errRatio=min(1.0, float(facts.get("err", 1.0))),
        status=status,
        spread=round(facts.get("spread", 0.0), 4),
        samples=facts.get("samples", 0),
        detail=detail,
        env=runner.side.name,
        op=str(facts.get("op", "")),
        timer=options.timed,
        aiter_config=str(facts.get("config", "")),
        run=run,
    )
