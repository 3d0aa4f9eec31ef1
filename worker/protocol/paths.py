"""Places and names in a node folder.

A *node folder* is one run's folder on one node::

    epoch                      number of the controller that may speak to this node (one line)
    node.json                  what the launcher and the workers need to know (NodeConfig)
    launch.sh tune.sh follow.sh   rendered scripts
    code/<sha>/worker/         this package
    code/texts/<sha256>        long texts of the tuner's options
    inbox/                     specs waiting:  SEQ.SLOT.ATTEMPT.json  (SLOT is a slot or `any`)
    taken/                     specs that the controller took back before a worker claimed them
    claimed/<slot>/            the spec a slot works on (claimed by rename), and the slot's lock file
    attempts/<attempt>/        spec.json and the tuner's own files of a finished or running attempt
    events/<slot>.jsonl        records of a slot, one JSON object a line, append-only
    logs/<slot>.log            what tuner and worker print
    beat/<slot>                touched while the worker lives
    control/stop               `drain` (finish the attempt, claim no more) or `now`
    control/cancel/<attempt>   end that attempt
    control/verdicts.json      what became elsewhere of candidates on the blocklist: a canary spec, read at the end
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

LOCKS, LOCKS_ENV = "/tmp/.gemmfleet-locks", "GEMMFLEET_LOCKS"
"""Folder of a host for the locks of its devices, the same for all runs and users; the variable names another, for
tests."""
ANY_SLOT = "any"
_ATTEMPT, _SLOT = "[A-Za-z0-9][A-Za-z0-9_-]{0,79}", "[0-9]{1,4}"
ATTEMPT_RE = re.compile(rf"{_ATTEMPT}\Z")
SLOT_RE = re.compile(rf"{_SLOT}\Z")
INBOX_RE = re.compile(rf"(?P<seq>[0-9]{{8}})\.(?P<slot>{ANY_SLOT}|{_SLOT})\.(?P<attempt>{_ATTEMPT})\.json\Z")


@dataclass(frozen=True, slots=True)
class NodePaths:
    """Every path of a node folder, for controller and worker."""

    root: Path

    @property
    def inbox(self) -> Path:
        return self.root / "inbox"

    @property
    def taken(self) -> Path:
        return self.root / "taken"

    @property
    def epoch(self) -> Path:
        return self.root / "epoch"

    @property
    def config(self) -> Path:
        return self.root / "node.json"

    @property
    def texts(self) -> Path:
        """Folder of long texts beside the code, sent once with it."""
        return self.root / "code" / "texts"

    @property
    def stop(self) -> Path:
        return self.root / "control" / "stop"

    @property
    def verdicts(self) -> Path:
        return self.root / "control" / "verdicts.json"

    def cancel(self, attempt: str) -> Path:
        return self.root / "control" / "cancel" / attempt

    def claimed(self, slot: str) -> Path:
        return self.root / "claimed" / slot

    def lock(self, slot: str) -> Path:
        return self.root / "claimed" / slot / "lock"

    def attempt(self, attempt: str) -> Path:
        return self.root / "attempts" / attempt

    def events(self, slot: str) -> Path:
        return self.root / "events" / f"{slot}.jsonl"

    def log(self, slot: str) -> Path:
        return self.root / "logs" / f"{slot}.log"

    def beat(self, slot: str) -> Path:
        return self.root / "beat" / slot

    def folders(self) -> tuple[str, ...]:
        """The folders of a fresh node folder, relative to its root."""
        return ("inbox", "taken", "claimed", "attempts", "events", "logs", "beat", "control/cancel")


@dataclass(frozen=True, slots=True)
class InboxName:
    """The name of a spec in the inbox; its order is the order of work, its slot who may claim it."""

    seq: int
    slot: str
    attempt: str

    def __str__(self) -> str:
        return f"{self.seq:08d}.{self.slot}.{self.attempt}.json"

    @classmethod
    def parse(cls, name: str) -> InboxName | None:
        m = INBOX_RE.match(name)
        return cls(int(m["seq"]), m["slot"], m["attempt"]) if m else None

    def claimable_by(self, slot: str) -> bool:
        return self.slot in (ANY_SLOT, slot)
