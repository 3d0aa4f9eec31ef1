"""A stand-in for a scheduler: leases in memory, all of them this machine; a test grants, ends or hides them."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence

from orchestrator.engines import Finding
from orchestrator.errors import UnreachableError
from orchestrator.leases.lease import EndCause, Lease, LeaseState
from orchestrator.transport.base import Transport
from orchestrator.transport.local import LocalTransport


class Scheduler:
    """`grants`: a lease is ready as soon as it is requested, on a host of its own. `silent`: it does not answer."""

    def __init__(self, *, grants: bool = False) -> None:
        self.leases: dict[str, Lease] = {}
        self.requests: list[tuple[int, frozenset[str]]] = []
        self.grants, self.silent = grants, False
        self.released: list[str] = []
        self._lock = threading.Lock()

    def ask(self, n: int, avoid: Collection[str] = ()) -> None:
        with self._lock:
            self.requests.append((n, frozenset(avoid)))
            for _ in range(n):
                id_ = str(len(self.leases) + 1)
                state = LeaseState.READY if self.grants else LeaseState.QUEUED
                self.leases[id_] = Lease(id_, state, host=f"g{id_}" if self.grants else "", why="Priority")

    def list(self) -> Sequence[Lease]:
        if self.silent:
            raise UnreachableError("pool", "the scheduler does not answer")
        with self._lock:
            return list(self.leases.values())

    def release(self, leases: Collection[Lease]) -> None:
        self.released += [x.id for x in leases]
        for lease in leases:
            if self.leases[lease.id].state is not LeaseState.ENDED:
                self.end(lease.id, EndCause.PREEMPTED)

    def ready(self, id_: str, host: str = "g1", ends_at: float | None = None) -> None:
        with self._lock:
            self.leases[id_] = Lease(id_, LeaseState.READY, host, ends_at=ends_at)

    def end(self, id_: str, cause: EndCause, why: str = "") -> None:
        with self._lock:
            self.leases[id_] = Lease(id_, LeaseState.ENDED, why=why or cause.value, cause=cause)

    def held(self) -> Sequence[str]:
        """Leases that are not over."""
        return [x.id for x in self.list() if x.state is not LeaseState.ENDED]

    def transport(self, lease: Lease, node: str) -> Transport:
        return LocalTransport(node)

    def check(self) -> Sequence[Finding]:
        return ()

    def leftovers(self, lease: Lease) -> bytes | None:
        return None

    def forget(self) -> None:
        """Leaves nothing."""

    def close(self) -> None:
        """Holds nothing."""
