"""`worker run`: one group from the command line, without inbox or agent."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from worker.agent.attempt import Attempt
from worker.agent.inbox import Control, SpecRejectedError, read_spec
from worker.agent.records import RecordFile
from worker.agent.tuner_process import TunerProcess, slot_token
from worker.agent.tuner_supervisor import StoppedError, TunerSupervisor
from worker.protocol import NodeConfig, NodePaths, ProtocolError, Spec, SpecShape, record
from worker.text import plural


class Printer(RecordFile):
    """A record file whose records are printed as text on stdout, too."""

    def __init__(self, path: Path, shapes: Sequence[SpecShape]) -> None:
        super().__init__(path)
        self._keys = {s.id: " ".join(f"{k}={v}" for k, v in s.key.items()) for s in shapes}
        self._rows: Counter[int] = Counter()
        self.tuned = 0

    def append(self, record: Mapping[str, Any]) -> None:
        super().append(record)
        if record["type"] == "row":
            self._rows[record["shape"]] += 1
        self.tuned += record["type"] == "shape_tuned"
        if line := self._line(record):
            print(line, flush=True)

    def _line(self, r: Mapping[str, Any]) -> str:
        if r["type"] == "tuner_ready":
            device = r["device"]
            facts = f"{device.get('gfx')} cu_num {device.get('cu_num')}, {device.get('device')}"
            return f"tuner {r['tuner']} is ready after {r['seconds']:.1f} s: {facts}"
        if r["type"] == "canary":
            return f"canary {'passed' if r['ok'] else 'FAILED'}: {r['us']:.1f} us, {r['detail']}"
        if r["type"] not in ("shape_tuned", "shape_failed"):
            return ""
        shape = f"shape {r['shape']} {self._keys[r['shape']]}"
        if r["type"] == "shape_failed":
            return f"{shape}: {r['reason']}, {r['detail']}"
        row = r["row"]
        best = f"{row['us']:.4g} us, {row.get('tflops', 0):.4g} TFLOPS, {row.get('kernelName', '?')}"
        return f"{shape}: {best} (of {plural(self._rows[r['shape']], 'candidate')})"


def run_group(group: Path, node_dir: Path, slot: str, tuner: str | None) -> int:
    """Run the spec in `group`. Status 0: every shape tuned; 1: not; 2: bad input; 130: interrupted."""
    paths = NodePaths(node_dir)
    try:
        spec = Spec.loads(read_spec(group))
        config = read_config(paths)
        name = tuner or spec.tuner or config.tuner
        if not name or not spec.shapes:
            raise ValueError("the spec has no shapes" if name else "no tuner is named; use --tuner")
        folder = paths.attempt(spec.attempt)
        folder.mkdir(parents=True, exist_ok=True)
        printer = Printer(folder / "records.jsonl", spec.shapes)
    except (OSError, ProtocolError, SpecRejectedError, ValueError) as e:
        print(f"worker run: {group}: {e}", file=sys.stderr)
        return 2
    control = Control(paths, slot, beats=False)
    control.take_signals()
    # a token of its own: the slot's agent must not take this process for a leftover
    place = {"node_dir": str(paths.root.resolve()), "node": config.node, "slot": slot}
    place["token"] = f"{slot_token(paths.root, slot)}:by-hand"
    log = sys.stderr.fileno()
    limits = {"start_timeout_s": config.start_timeout_s, "canary_timeout_s": config.canary_timeout_s}
    variables = config.slots.get(slot, {})
    supervisor = TunerSupervisor(
        name, lambda: TunerProcess(name, config.options, place, variables, log), printer, control, log, **limits
    )
    try:
        supervisor.bring_up()
    except StoppedError:
        supervisor.drop()
        return 130
    if supervisor.proc is None:
        return 1
    device = {k: supervisor.device.get(k) for k in ("gfx", "cu_num", "device")}
    printer.append(record("attempt_started", time.time(), attempt=spec.attempt, group=spec.group, device=device))
    began = time.monotonic()
    ended = Attempt(spec, supervisor.proc, printer, control, log).run(spec.dumps())
    seconds = time.monotonic() - began
    printer.append(ended.record(spec.attempt, seconds, supervisor.take_start_s()))
    printer.sync()
    supervisor.close()
    detail = f" ({ended.detail})" if ended.detail else ""
    print(f"{ended.outcome}{detail}: {printer.tuned} of {plural(len(spec.shapes), 'shape')} tuned in {seconds:.1f} s")
    print(f"records: {folder / 'records.jsonl'}")
    if ended.outcome == "cancelled":
        return 130
    return 0 if printer.tuned == len(spec.shapes) else 1


def read_config(paths: NodePaths) -> NodeConfig:
    """node.json, or the defaults where the folder has none. Raises OSError, ProtocolError."""
    try:
        return NodeConfig.loads(paths.config.read_bytes())
    except FileNotFoundError:
        return NodeConfig(run="by-hand", node="", tuner="")
