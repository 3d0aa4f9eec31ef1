"""Places and names in a node folder, and environment variables between the launch scripts and the worker.

A spec goes through the folder like this: the controller puts `inbox/00000012.any.g0007-1.json` there, the slot that
renames it to `claimed/3/` owns it, and at its end it is `attempts/g0007-1/spec.json` (worker/agent/inbox.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

AITER_ROOT_ENV = "GEMMFLEET_AITER_ROOT"
"""The inventory's path of AITER."""
VLLM_ROOT_ENV = "GEMMFLEET_VLLM_ROOT"
SGLANG_ROOT_ENV = "GEMMFLEET_SGLANG_ROOT"
"""The inventory's path of vLLM."""
CACHE_ENV = "GEMMFLEET_CACHE"
"""The node's folder for what outlives a run."""
IMAGE_ENV = "GEMMFLEET_IMAGE_DIGEST"
INVENTORY_ENV = "GEMMFLEET_INVENTORY_ENV"
"""Names of the variables that the inventory sets; the others come from the image."""
CLEARED_ENV = "GEMMFLEET_CLEARED_ENV"
"""Names that tune.sh cleared before the worker began; GPU_ARCHS and CU_NUM with their values (`CU_NUM=256`)."""

AITER_CLEARED = re.compile(
    r"AITER_CONFIG_\w+|AITER_REBUILD|AITER_(?:TUNE_GEMM|ONLINE_TUNE|BYPASS_TUNE_CONFIG|LOG_MORE|LOG_TUNED_CONFIG)"
    r"|AITER_JIT_DIR|AITER_META_DIR|AITER_ASM_DIR|HIP_ONLINE_TUNING|PYTORCH_TUNABLEOP_\w+|GTUNE_\w+|TUNE_ONLY|OPUS_ONLY"
    r"|OPUS_SKIP_CKTILE"
)
"""Switches that choose other tables, other kernels or another build than the image's own."""
AITER_SWITCHES = re.compile(
    r"GPU_ARCHS|CU_NUM|TUNE_MOE_\w+|AITER_(?:TRITON_ONLY|KSPLIT|OPUS_TUNED_CSV_GLOB|TUNE_CANDIDATE_DUMP_DIR"
    r"|RUN_CONFIG_COS_TOL)"
)
"""Switches that change which candidates there are or how they are judged; cleared, unless the inventory names them."""

LOCKS = "/tmp/.gemmfleet-locks"
"""Folder of a host for the locks of its devices, the same for all runs and users."""
LOCKS_ENV = "GEMMFLEET_LOCKS"
"""Names another folder for them, for tests."""
ANY_SLOT = "any"
_ATTEMPT = "[A-Za-z0-9][A-Za-z0-9_-]{0,79}"
_SLOT = "[0-9]{1,4}"
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

    def last_end(self, slot: str) -> Path:
        """The end of the slot's last worker as a script noted it: exit code, begin, end, whether memory ran out."""
        return self.root / "supervisor" / f"{slot}.ended"

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
    """The name of a spec in the inbox, such as `00000012.any.g0007-1.json`."""

    seq: int
    """Its place in the order of work."""
    slot: str
    """The slot that may claim it, or `any`."""
    attempt: str

    def __str__(self) -> str:
        return f"{self.seq:08d}.{self.slot}.{self.attempt}.json"

    @classmethod
    def parse(cls, name: str) -> InboxName | None:
        match = INBOX_RE.match(name)
        return cls(int(match["seq"]), match["slot"], match["attempt"]) if match else None

    def claimable_by(self, slot: str) -> bool:
        return self.slot in (ANY_SLOT, slot)
