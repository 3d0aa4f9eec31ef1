"""A slot's side of the inbox: it claims specs, reads them, and puts them away.

The slot that renames a spec out of `inbox/` owns it; losing that race is normal. A claimed spec is in `claimed/<slot>/`
until its end is recorded, then in `attempts/<attempt>/`.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from worker.protocol import MAX_SPEC_BYTES, InboxName, NodeConfig, NodePaths, ProtocolError, Spec


class SpecRejectedError(Exception):
    """A claimed spec will not be run; the text says why."""


class Inbox:
    """One slot's side of the inbox."""

    def __init__(self, paths: NodePaths, slot: str) -> None:
        self._paths = paths
        self._slot = slot

    def claim(self, *, canaries_only: bool = False) -> InboxName | None:
        """Claim the first spec that this slot may take, if there is one.

        `canaries_only`: take only specs of kind canary that name this slot. The kind is not in the file's name, so
        these specs are read before they are claimed.
        """
        for text in sorted(os.listdir(self._paths.inbox)):
            name = InboxName.parse(text)
            if name is None or not name.claimable_by(self._slot):
                continue
            if canaries_only and not (name.slot == self._slot and self._is_canary(text)):
                continue
            try:
                os.rename(self._paths.inbox / text, self.path(name))
            except FileNotFoundError:  # another slot was faster
                continue
            return name
        return None

    def path(self, claim: InboxName) -> Path:
        """The file of a spec that this slot has claimed."""
        return self._paths.claimed(self._slot) / str(claim)

    def claimed(self) -> list[InboxName]:
        """Specs that this slot has claimed, in order."""
        names = map(InboxName.parse, sorted(os.listdir(self._paths.claimed(self._slot))))
        return [name for name in names if name]

    def put_away(self, claim: InboxName, as_name: str = "spec.json") -> None:
        """Move a claimed spec into its attempt's folder, where `spec.json` marks the attempt as ended."""
        folder = self._paths.attempt(claim.attempt)
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / as_name
        if os.path.lexists(target):
            target = folder / f"{claim.seq:08d}.{as_name}"
        os.rename(self.path(claim), target)

    def _is_canary(self, text: str) -> bool:
        """Return whether a waiting spec is a canary. An unreadable spec counts too: it is claimed and then refused."""
        try:
            return Spec.loads(read_spec(self._paths.inbox / text)).kind == "canary"
        except FileNotFoundError:
            return False
        except (OSError, ProtocolError, SpecRejectedError):
            return True


def read_spec(path: Path) -> bytes:
    """The bytes of a spec. Raises OSError, or SpecRejectedError if it is not a plain file or too large."""
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


def accept(path: Path, attempt: str, config: NodeConfig, epoch: int) -> tuple[Spec, bytes]:
    """A claimed spec, and its bytes on one line. Raises SpecRejectedError, which says why not to run it."""
    try:
        data = read_spec(path)
        spec = Spec.loads(data)
    except OSError as e:
        raise SpecRejectedError(f"the spec cannot be read: {e.strerror}") from e
    except ProtocolError as e:
        raise SpecRejectedError(str(e)) from e
    if spec.attempt != attempt:
        raise SpecRejectedError(f"the spec is of attempt {spec.attempt}, its file of {attempt}")
    if spec.run != config.run:
        raise SpecRejectedError(f"the spec is of run {spec.run!r}, this node works for {config.run!r}")
    if spec.epoch < epoch:
        raise SpecRejectedError(f"the spec is of controller {spec.epoch}, the node listens to {epoch}")
    if spec.tuner and spec.tuner != config.tuner:
        raise SpecRejectedError(f"the spec asks for tuner {spec.tuner}, this worker holds {config.tuner}")
    return spec, data.replace(b"\n", b" ").replace(b"\r", b" ")
