"""`worker run GROUP.json`: runs one group from the command line, without inbox or agent, for people who debug a node.

It uses the same parts as the agent (loop.py): a TunerSupervisor, and one Attempt. What the agent would record is in
attempts/<attempt>/records.jsonl, and the main steps are printed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from worker.agent.attempt import Attempt
from worker.agent.control import Control, read_config
from worker.agent.inbox import SpecRejectedError, read_spec
from worker.agent.records import RecordFile
from worker.agent.tuner_process import TunerProcess, slot_token
from worker.agent.tuner_supervisor import StoppedError, TunerSupervisor
from worker.protocol import NodePaths, ProtocolError, Spec, record
from worker.text import plural


class Printer(RecordFile):
    """A record file that prints what it records of the tuner, and counts the tuned shapes."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.tuned = 0

    def append(self, record: Mapping[str, Any]) -> None:
        super().append(record)
        if record["type"] == "shape_tuned":
            self.tuned += 1
        elif record["type"] == "tuner_ready":
            device = record["device"]
            facts = f"{device.get('gfx')} cu_num {device.get('cu_num')}, {device.get('device')}"
            print(f"tuner {record['tuner']} is ready after {record['seconds']:.1f} s: {facts}", flush=True)
        elif record["type"] == "canary":
            verdict = "passed" if record["ok"] else "FAILED"
            print(f"canary {verdict}: {record['us']:.1f} us, {record['detail']}", flush=True)


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
        printer = Printer(folder / "records.jsonl")
    except (OSError, ProtocolError, SpecRejectedError, ValueError) as e:
        print(f"worker run: {group}: {e}", file=sys.stderr)
        return 2
    control = Control(paths, slot, beats=False)
    control.take_signals()
    # a token of its own: the slot's agent must not take this process for a leftover
    token = f"{slot_token(paths.root, slot)}:by-hand"
    place = {"node_dir": str(paths.root.resolve()), "node": config.node, "slot": slot, "token": token}
    log = sys.stderr.fileno()
    spawn = partial(TunerProcess, name, config.options, place, config.slots.get(slot, {}), log)
    supervisor = TunerSupervisor(name, config, spawn, printer, control, log)
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
    ended = Attempt(spec, supervisor.proc, printer, control, log, partial(print, flush=True)).run(spec.dumps())
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
