"""`worker run GROUP.json`: runs one group from the command line, without inbox or agent, for people who debug a node.

It uses the same parts as the agent (loop.py): a TunerSupervisor, and one Attempt. What the agent would record is in
attempts/<attempt>/records.jsonl. What it would write into the slot's log is printed (`tell` of the Attempt), and so are
the tuner's device and the canary (PrintedRecords).
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


class PrintedRecords(RecordFile):
    """A record file that also prints the tuner's device and the canary, and counts the tuned shapes."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.tuned = 0

    def append(self, new: Mapping[str, Any]) -> None:
        super().append(new)
        if new["type"] == "shape_tuned":
            self.tuned += 1
        elif new["type"] == "tuner_ready":
            device = new["device"]
            facts = f"{device.get('gfx')} cu_num {device.get('cu_num')}, {device.get('device')}"
            print(f"tuner {new['tuner']} is ready after {new['seconds']:.1f} s: {facts}", flush=True)
        elif new["type"] == "canary":
            verdict = "passed" if new["ok"] else "FAILED"
            print(f"canary {verdict}: {new['us']:.1f} us, {new['detail']}", flush=True)


def run_group(group: Path, node_dir: Path, slot: str, tuner: str | None) -> int:
    """Run the spec in `group`. Status 0: every shape tuned; 1: not; 2: bad input; 130: interrupted."""
    paths = NodePaths(node_dir)
    try:
        spec = Spec.loads(read_spec(group))
        config = read_config(paths)
        tuner_name = tuner or spec.tuner or config.tuner
        if not tuner_name:
            raise ValueError("no tuner is named; use --tuner")
        if not spec.shapes:
            raise ValueError("the spec has no shapes")
        folder = paths.attempt(spec.attempt)
        folder.mkdir(parents=True, exist_ok=True)
        records = PrintedRecords(folder / "records.jsonl")
    except (OSError, ProtocolError, SpecRejectedError, ValueError) as e:
        print(f"worker run: {group}: {e}", file=sys.stderr)
        return 2
    control = Control(paths, slot, beats=False)
    control.take_signals()
    # The token marks the processes of a slot. With the slot's own, its agent would end this one as a leftover.
    token = f"{slot_token(paths.root, slot)}:by-hand"
    place = {"node_dir": str(paths.root.resolve()), "node": config.node, "slot": slot, "token": token}
    log = sys.stderr.fileno()
    spawn = partial(TunerProcess, tuner_name, config.options, place, config.slots.get(slot, {}), log)
    supervisor = TunerSupervisor(tuner_name, config, spawn, records, control, log)
    try:
        supervisor.bring_up()
    except StoppedError:
        supervisor.drop()
        return 130
    if supervisor.proc is None:
        return 1
    device = {k: supervisor.device.get(k) for k in ("gfx", "cu_num", "device")}
    records.append(record("attempt_started", time.time(), attempt=spec.attempt, group=spec.group, device=device))
    began = time.monotonic()
    ended = Attempt(spec, supervisor.proc, records, control, log, partial(print, flush=True)).run(spec.dumps())
    seconds = time.monotonic() - began
    records.append(ended.record(spec.attempt, seconds, supervisor.take_start_s()))
    records.sync()
    supervisor.close()
    detail = f" ({ended.detail})" if ended.detail else ""
    print(f"{ended.outcome}{detail}: {records.tuned} of {plural(len(spec.shapes), 'shape')} tuned in {seconds:.1f} s")
    print(f"records: {folder / 'records.jsonl'}")
    if ended.outcome == "cancelled":
        return 130
    return 0 if records.tuned == len(spec.shapes) else 1
