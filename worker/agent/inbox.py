"""Inbox of a node and the specs that a slot claimed from it: claimed by rename, validated, archived.

The slot that renames a spec out of `inbox/` owns it; losing that race is normal. A claimed spec lies in
`claimed/<slot>/` until its end is recorded, then in `attempts/<attempt>/`.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from worker.protocol import MAX_SPEC_BYTES, InboxName, NodePaths, ProtocolError, Spec


@dataclass(frozen=True, slots=True)
class Claim:
    """A spec that is this slot's to run."""

    name: InboxName
    path: Path


class SpecRejectedError(Exception):
    """A claimed spec that will not be run; the text says why."""


class Inbox:
    """One slot's side of the inbox."""

    def __init__(self, paths: NodePaths, slot: str) -> None:
        self._paths = paths
        self._slot = slot
        self._no_canary: set[str] = set()

    def claim(self, *, canaries_only: bool = False) -> Claim | None:
        """Claim the first spec that this slot may take, None if there is none.

        `canaries_only`: none but specs of kind canary that name this slot. The kind is not in the name, so
        that those specs are read before they are claimed.
        """
        for text in sorted(os.listdir(self._paths.inbox)):
            name = InboxName.parse(text)
            if name is None or not name.claimable_by(self._slot):
                continue
            if canaries_only and not (name.slot == self._slot and self._is_canary(text)):
                continue
            path = self._paths.claimed(self._slot) / text
            try:
                os.rename(self._paths.inbox / text, path)
            except FileNotFoundError:  # another slot was faster
                continue
            return Claim(name, path)
        return None

    def claimed(self) -> list[Claim]:
        """Specs that this slot has claimed, in order."""
        folder = self._paths.claimed(self._slot)
        names = [(text, InboxName.parse(text)) for text in sorted(os.listdir(folder))]
        return [Claim(name, folder / text) for text, name in names if name]

    def put_away(self, claim: Claim, as_name: str = "spec.json") -> None:
        """Move a claimed spec into its attempt's folder, where `spec.json` marks the attempt as ended."""
        folder = self._paths.attempt(claim.name.attempt)
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / as_name
        if os.path.lexists(target):
            target = folder / f"{claim.name.seq:08d}.{as_name}"
        os.rename(claim.path, target)

    def _is_canary(self, text: str) -> bool:
        """Whether a waiting spec is a canary. One that cannot be read counts: it is claimed to be refused."""
        if text in self._no_canary:
            return False
        try:
            if Spec.loads(read_spec(self._paths.inbox / text)).kind == "canary":
                return True
        except FileNotFoundError:
            return False
        except (OSError, ProtocolError, SpecRejectedError):
            return True
        self._no_canary.add(text)
        return False


def read_spec(path: Path) -> bytes:
    """The bytes of a spec. Raises OSError, or SpecRejectedError for no plain file or one too large."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise SpecRejectedError("the spec is not a regular file")
        if info.st_size > MAX_SPEC_BYTES:
            raise SpecRejectedError(f"the spec is larger than {MAX_SPEC_BYTES} bytes")
        with os.fdopen(fd, "rb", closefd=False) as f:
            return f.read(MAX_SPEC_BYTES + 1)
    finally:
        os.close(fd)


def accept(claim: Claim, *, run: str, epoch: int, tuner: str) -> tuple[Spec, bytes]:
    """A claim's spec and its bytes on one line. Raises SpecRejectedError with the reason not to run it."""
    try:
        data = read_spec(claim.path)
        spec = Spec.loads(data)
    except OSError as e:
        raise SpecRejectedError(f"the spec cannot be read: {e.strerror}") from e
    except ProtocolError as e:
        raise SpecRejectedError(str(e)) from e
    if spec.attempt != claim.name.attempt:
        raise SpecRejectedError(f"the spec is of attempt {spec.attempt}, its file of {claim.name.attempt}")
    if spec.run != run:
        raise SpecRejectedError(f"the spec is of run {spec.run!r}, this node works for {run!r}")
    if spec.epoch < epoch:
        raise SpecRejectedError(f"the spec is of controller {spec.epoch}, the node listens to {epoch}")
    if spec.tuner and spec.tuner != tuner:
        raise SpecRejectedError(f"the spec asks for tuner {spec.tuner}, this worker holds {tuner}")
    return spec, data.replace(b"\n", b" ").replace(b"\r", b" ")
