"""Why a node could not be reached over SSH. All are TransportErrors; the kind says whether to try again.

TransportError
├── UnreachableError     no connection: refused, reset, no answer, name not found (`transient`: trying again may help;
│                         `silent`: nothing came back in time; `greeted`: but its sshd had said hello;
│                         `refused`: the host is there and nothing listens)
├── HostKeyError         the host's key is unknown, changed or revoked; trying again is useless
└── LoginError           the host takes none of our keys
"""

from __future__ import annotations

from orchestrator.errors import TransportError


class UnreachableError(TransportError):
    """There is no connection, or it broke."""

    def __init__(
        self,
        node: str,
        message: str,
        *,
        transient: bool = True,
        silent: bool = False,
        greeted: bool = False,
        refused: bool = False,
    ) -> None:
        self.transient = transient
        self.silent = silent
        self.greeted = greeted
        self.refused = refused
        super().__init__(node, message)


class HostKeyError(TransportError):
    """A host on the way is not proven to be the one that is meant."""


class LoginError(TransportError):
    """The host is the right one and does not let us in."""
