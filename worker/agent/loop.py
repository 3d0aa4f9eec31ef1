"""The agent of a slot: drains the node's inbox, one attempt at a time, for as long as there is work.

`worker agent` calls `main`. The agent holds the slot's lock from start to end. The order in `Agent.run`: wait for the
device, end what an earlier agent of the slot left behind, record our start, close the attempts that it had claimed
(none of them is run again: the controller decides about that), then drain. The tuner's process passes a canary before
anything is claimed, and again after every process that was lost (tuner_supervisor.py). attempt.py runs one attempt.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from worker import PACKAGE_PARENT
from worker.agent.attempt import Attempt, AttemptEnd
from worker.agent.control import Control, read_epoch
from worker.agent.inbox import Inbox, SpecRejectedError, accept, read_spec
from worker.agent.locks import DeviceLock, SlotTakenError, lock_slot, sign
from worker.agent.records import FULL, RecordFile, attempt_records, in_flight
from worker.agent.tuner_process import TOKEN, TunerProcess, slot_token
from worker.agent.tuner_supervisor import StoppedError, TunerSupervisor
from worker.conditions import Gauge
from worker.device import SLOTS_ON_CORES, identify, pin, slots_on_cores
from worker.process import WorkerEnd, kill_marked
from worker.protocol import (
    CPUS,
    DEVICE_LOCK,
    DEVICE_SHARED,
    PROTOCOL,
    InboxName,
    NodeConfig,
    NodePaths,
    ProtocolError,
    Spec,
    hardware_evidence,
    record,
)
from worker.protocol.paths import IMAGE_ENV
from worker.text import OWN_LINE, clean, plural

WAIT_SHOWN_S = 1.0
"""A wait for the device that lasts longer is shown to the user: the run before may just be ending."""
POLL_S = 0.01
"""Seconds between looks into the inbox,"""
POLL_SLOW_S = 0.05
"""and after POLL_FAST_FOR_S seconds without work."""
POLL_FAST_FOR_S = 5.0
DISK_RETRY_S = 1.0
CODE_SHA = PACKAGE_PARENT.name if PACKAGE_PARENT.parent.name == "code" else ""
"""The name of the deployed code (`code/<sha>/worker`), "" if it was not deployed."""


class Agent:
    """One slot of one node, from `run` to its return."""

    def __init__(self, paths: NodePaths, slot: str, config: NodeConfig) -> None:
        """Takes the slot's lock and opens its files. Raises SlotTakenError, OSError."""
        self._paths = paths
        self._slot = slot
        self._config = config
        for folder in (*paths.folders(), f"claimed/{slot}"):
            (paths.root / folder).mkdir(parents=True, exist_ok=True)
        self._lock = lock_slot(paths.lock(slot))
        self._log_fd = os.open(
            paths.log(slot), os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        name = config.slots[slot].get(DEVICE_LOCK)
        self._device = DeviceLock(name, f"{config.run}/{config.node}") if name else None
        self._records = RecordFile(paths.events(slot))
        self._control = Control(paths, slot)
        self._inbox = Inbox(paths, slot)
        self._gauge = Gauge(config.slots[slot])
        self._waiting: list[tuple[InboxName, str]] = []
        """Specs that are over, with the name that each gets, and cannot be moved yet because the disk is full."""
        self._token = slot_token(paths.root, slot)
        self._supervisor = TunerSupervisor(
            config.tuner, config, self._spawn, self._records, self._control, self._log_fd
        )

    def run(self) -> int:
        """Work until a request to stop, or idle for too long; the exit status (1: records could not be written)."""
        self._control.take_signals()
        self._control.tick()
        if not self._await_device():
            self._log(f"worker stopped before its device was free: {self._control.why}")
            self._records.close()
            return 0
        cores = pin(self._config.slots[self._slot].get(CPUS, ""))
        if cores:
            self._log(f"runs on {cores} cores near its GPU")
        # the lock is ours: nobody else can have a living tuner of this slot
        for pid in kill_marked(f"{TOKEN}={self._token}"):
            self._log(f"ended process {pid}, which an earlier worker of this slot left behind")
        self._records.append(record("worker_started", time.time(), info=self._describe_worker()))
        self._close_leftovers()
        self._gauge.read()  # finds its source, which may take a moment, before there is work
        why = self._drain()
        self._pass_last_verdicts()
        self._supervisor.close()
        self._records.append(record("worker_stopped", time.time(), why=why))
        self._log(f"worker stopped: {why}")
        are_records_written = self._records.retry()
        self._records.close()
        return 0 if are_records_written else 1

    def _describe_worker(self) -> dict[str, Any]:
        """The field `info` of worker_started."""
        info = {"pid": os.getpid(), "epoch": read_epoch(self._paths), "protocol": PROTOCOL, "code": CODE_SHA}
        digest = os.environ.get(IMAGE_ENV)
        if digest:
            info["image"] = digest
        return {**info, **identify({**os.environ, **self._config.slots[self._slot]})}

    def _await_device(self) -> bool:
        """Lock the slot's device. Wait while another run holds it, unless the device is shared. Return False if the
        worker is to stop.

        What we wait for stands in the slot's lock file, from where the stream's beats show it (follow.py). So does a
        lock that cannot be opened, even if the device is shared.
        """
        device = self._device
        is_shared = DEVICE_SHARED in self._config.slots[self._slot]
        began = time.monotonic()
        logged = ""
        signed = ""
        try:
            while device is not None and not device.take():
                holder = device.holder or "another run"
                if holder != logged:
                    self._log_holder(holder, is_closed=device.is_closed, is_shared=is_shared)
                    logged = holder
                is_long = time.monotonic() - began > WAIT_SHOWN_S
                if holder != signed and (device.is_closed or (is_long and not is_shared)):
                    sign(self._lock, holder)
                    signed = holder
                if is_shared:
                    return True
                self._control.tick()
                if self._control.stop:
                    return False
                time.sleep(POLL_SLOW_S)
            sign(self._lock)
        except OSError as e:
            self._log(f"the device cannot be locked, other runs may measure on it as well: {e}")
        return True

    def _log_holder(self, holder: str, *, is_closed: bool, is_shared: bool) -> None:
        verb = "shares" if is_shared else "waits for"
        why = f"whose lock is closed: {holder}" if is_closed else f"which {holder} measures on"
        self._log(f"{verb} this slot's device, {why}")

    def _pass_last_verdicts(self) -> None:
        """Pass the controller's last verdicts on blocked candidates to the tuner; no further spec brings them."""
        try:
            spec = Spec.loads(read_spec(self._paths.verdicts))
        except FileNotFoundError:
            return
        except (OSError, ProtocolError, SpecRejectedError) as e:
            self._log(f"{self._paths.verdicts.name} is not read: {e}")
            return
        if self._supervisor.proc is not None and spec.run == self._config.run:
            self._supervisor.proc.send(b"V " + spec.dumps())

    def _drain(self) -> str:
        """The loop; returns why it ended."""
        idle_since = time.monotonic()
        while True:
            self._control.tick()
            if self._control.stop:
                return self._control.why
            if self._records.full or self._waiting:
                self._supervisor.wait(DISK_RETRY_S)
                if self._records.retry():
                    self._put_away_all()
                continue
            if self._supervisor.proc is not None and self._supervisor.proc.gone:
                self._supervisor.wait(0)
            if self._supervisor.proc is None and not self._supervisor.sick:
                try:
                    self._supervisor.bring_up()
                except StoppedError:
                    self._supervisor.drop()
                idle_since = time.monotonic()
                continue
            claim = self._inbox.claim(canaries_only=self._supervisor.sick)
            if claim:
                self._work(claim)
                idle_since = time.monotonic()
                continue
            idle = time.monotonic() - idle_since
            if self._config.idle_exit_s and idle > self._config.idle_exit_s:
                return f"idle for {idle:.0f} s"
            self._supervisor.wait(POLL_S if idle < POLL_FAST_FOR_S else POLL_SLOW_S)

    def _work(self, claim: InboxName) -> None:
        """Run a claimed spec to its end: rejected, or started and ended on record."""
        attempt = claim.attempt
        if self._device:
            with suppress(OSError):
                self._device.take()  # a shared device whose other run has ended is ours from now on
        try:
            spec, line = accept(self._inbox.path(claim), attempt, self._config, read_epoch(self._paths))
            room = self._make_folder(attempt)
        except SpecRejectedError as e:
            self._log(f"rejected {attempt}: {e}")
            self._records.append(record("spec_rejected", time.time(), attempt=attempt, detail=clean(str(e))))
            self._put_away(claim, "rejected.json")
            return
        self._log(f"attempt {attempt} of {spec.group or spec.kind}: {plural(len(spec.shapes), 'shape')}")
        device = {k: self._supervisor.device.get(k) for k in ("gfx", "cu_num", "device")}
        before = self._gauge.read()
        self._records.append(
            record("attempt_started", time.time(), attempt=attempt, group=spec.group, device=device, conditions=before)
        )
        began = time.monotonic()
        ended = self._run(spec, line) if room else AttemptEnd("disk_full", None, None, "no space for its folder")
        seconds = time.monotonic() - began
        after = self._gauge.read(fresh=ended.outcome not in ("done", "cancelled"))
        self._end(claim, ended.with_evidence(hardware_evidence(before, after)), seconds, after)
        if not ended.process_is_fit:
            self._supervisor.drop()
        else:
            self._supervisor.time_canary(self._gauge.read)

    def _run(self, spec: Spec, line: bytes) -> AttemptEnd:
        if self._control.cancelled(spec.attempt):
            return AttemptEnd("cancelled", None, None, "cancelled before it began")
        if spec.kind == "canary":
            return self._supervisor.answer_canary(spec)
        assert self._supervisor.proc is not None
        return Attempt(spec, self._supervisor.proc, self._records, self._control, self._log_fd, self._log).run(line)

    def _end(self, claim: InboxName, ended: AttemptEnd, seconds: float, conditions: Mapping[str, Any]) -> None:
        attempt = claim.attempt
        self._records.append(ended.record(attempt, seconds, self._supervisor.take_start_s(), conditions))
        self._records.sync()
        why = ended.detail.partition("; the log ends")[0]
        self._log(f"attempt {attempt} ended: {ended.outcome} {why}".rstrip())
        self._put_away(claim)
        if ended.outcome == "cancelled":
            self._paths.cancel(attempt).unlink(missing_ok=True)

    def _put_away(self, claim: InboxName, as_name: str = "spec.json") -> None:
        """Move it out of `claimed/`, once the record of its end is in the file and there is room for its folder."""
        self._waiting.append((claim, as_name))
        if not self._records.full:
            self._put_away_all()

    def _put_away_all(self) -> None:
        try:
            while self._waiting:
                self._inbox.put_away(*self._waiting[0])
                self._waiting.pop(0)
        except OSError as e:
            if e.errno not in FULL:
                raise

    def _make_folder(self, attempt: str) -> bool:
        """Create the attempt's folder; False where the disk is full. Raises SpecRejectedError where there is one."""
        try:
            self._paths.attempt(attempt).mkdir()
        except FileExistsError:
            raise SpecRejectedError("the attempt was started on this node before") from None
        except OSError as e:
            if e.errno not in FULL:
                raise
            return False
        return True

    def _close_leftovers(self) -> None:
        """End on record what an earlier agent of this slot had claimed, and how that one ended."""
        end = WorkerEnd.read(self._paths.last_end(self._slot))
        for claim in self._inbox.claimed():
            attempt = claim.attempt
            known = attempt_records(self._paths.events(self._slot), attempt)
            if not any(r["type"] == "attempt_ended" for r in known):
                seconds = max(0.0, known[-1]["t"] - known[0]["t"]) if known else 0.0
                detail = "found claimed by a worker that is gone"
                if end is not None and known and end.ended > known[0]["t"]:  # else an older end, or none was noted
                    seconds = end.ended - known[0]["t"]
                    detail = f"its worker is gone: {end.words}"
                ended = AttemptEnd("worker_died", in_flight(known), None, detail)
                self._records.append(ended.record(attempt, seconds))
                self._records.sync()
                self._log(f"closed attempt {attempt}, which an earlier worker left claimed")
            self._put_away(claim)

    def _spawn(self) -> TunerProcess:
        place = {
            "node_dir": str(self._paths.root),
            "node": self._config.node,
            "slot": self._slot,
            "token": self._token,
        }
        slots = self._config.slots
        env = {**slots[self._slot], SLOTS_ON_CORES: str(slots_on_cores(slots, self._slot))}
        return TunerProcess(self._config.tuner, self._config.options, place, env, self._log_fd)

    def _log(self, text: str) -> None:
        """Write a line of the worker's own to the slot's log; lost where it cannot be written."""
        stamp = time.strftime("%H:%M:%SZ", time.gmtime())
        try:
            os.write(self._log_fd, f"{OWN_LINE}{stamp}] {clean(text)}\n".encode())
        except OSError as e:
            if e.errno not in FULL:
                raise


def main(node_dir: Path, slot: str) -> int:
    """Run the agent of a slot; prints what is wrong. Status 2: bad node folder, 4: the slot has an agent."""
    paths = NodePaths(node_dir)
    try:
        config = NodeConfig.loads(paths.config.read_bytes())
        if slot not in config.slots:
            raise ValueError(f"node.json has no slot {slot!r}, only {', '.join(config.slots)}")
        agent = Agent(paths, slot, config)
    except SlotTakenError as e:
        print(f"worker: {e}", file=sys.stderr)
        return 4
    except (OSError, ValueError) as e:
        print(f"worker: {node_dir} cannot be used: {e}", file=sys.stderr)
        return 2
    return agent.run()
