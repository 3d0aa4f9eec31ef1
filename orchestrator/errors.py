"""Error tree. A message names file, row, node and the way out; the CLI prints it without a traceback.

OrchestratorError                exit code
├── InputError                   2   the user's files or options
│   ├── ShapesError
│   ├── InventoryError
│   └── TunedDBError
├── LedgerError                  2   a ledger that cannot be used here
├── RunBusyError                 2   another controller drives the run
├── TakenOverError               2   a younger controller took the run over
├── TemplateError                2
├── LeftOutError                 3   an occupied node, with --busy skip
├── NoUsableNodeError            3
└── NodeError                    3   carries the node
    ├── TransportError
    │   ├── SlowError
    │   ├── UnreachableError     no connection: refused, reset, no answer, name not found
    │   ├── HostKeyError         the host's key is unknown, changed or revoked; trying again is useless
    │   └── LoginError           the host accepts none of our keys
    └── EngineError
"""

from __future__ import annotations

from collections.abc import Sequence


class OrchestratorError(Exception):
    """Root of everything this program raises on purpose."""

    exit_code = 2

    @property
    def reason(self) -> str:
        """The message; errors of a node give it without the node's name in front."""
        return str(self)


class InputError(OrchestratorError):
    """Invalid input of the user; all faults at once, one a line."""

    def __init__(self, faults: Sequence[str] | str) -> None:
        self.faults = [faults] if isinstance(faults, str) else list(faults)
        super().__init__("\n".join(self.faults))


class ShapesError(InputError):
    """A shapes CSV that cannot be used."""


class InventoryError(InputError):
    """An inventory that cannot be used."""


class TunedDBError(InputError):
    """A tuned table that cannot be used."""


class LedgerError(OrchestratorError):
    """A ledger that cannot be opened, read or trusted."""


class RunBusyError(OrchestratorError):
    """Another living controller drives this run."""


class TakenOverError(OrchestratorError):
    """A younger controller took this run over; this one must not go on."""


class TemplateError(OrchestratorError):
    """A template that does not render."""


class LeftOutError(OrchestratorError):
    """The node is occupied, and is to be left out of the run then."""

    exit_code = 3


class NoUsableNodeError(OrchestratorError):
    """No node, slot or engine is left to work on."""

    exit_code = 3


class NodeError(OrchestratorError):
    """Something went wrong on or with one node."""

    exit_code = 3

    def __init__(self, node: str, message: str) -> None:
        self.node = node
        from worker.text import uncoloured  # here: the help of a command needs no texts

        # a message that wraps another error of the node may name it already
        super().__init__(f"{node}: {uncoloured(message).removeprefix(f'{node}: ')}")

    @property
    def reason(self) -> str:
        return str(self).removeprefix(f"{self.node}: ")


class TransportError(NodeError):
    """The node could not be reached, or a command or file did not get there."""


class SlowError(TransportError):
    """The node is there and did not answer in time."""


class EngineError(NodeError):
    """Workers could not be started, listed or stopped on a node."""


class UnreachableError(TransportError):
    """No connection, or a broken one.

    `transient`: trying again may help. `silent`: nothing came back in time; `greeted`: but its sshd had sent its
    version. `refused`: the host is there and nothing listens on the port.
    """

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
    """A host on the way could not prove its identity."""


class LoginError(TransportError):
    """The host proved its identity and accepts none of our keys."""
