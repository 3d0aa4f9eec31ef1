"""Says how many leases the pools of a run are to hold, and whether more may come.

leased_nodes.py asks in each turn in which it may request leases. The policy knows how much work is left, and whether
shapes wait for another machine that confirms them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from math import ceil

from orchestrator.leases.lease_lifecycle import HELD, LeaseLifecycle, Pool
from orchestrator.policy import Policy

LEASE_WORK_S = 600.0
"""One more lease is worth asking for if there is this much work for each of its slots."""
PLACE_S = 600.0
"""Longest time that a shape waits, with nothing else going on, for a machine that can confirm it (it did not run
there)."""


class PoolSizes:
    """The sizes of the pools of one run."""

    def __init__(self, pools: Sequence[Pool]) -> None:
        self._pools = pools
        self._settled = -1
        """The number of settled shapes, when it was counted last."""
        self._last_change = 0.0
        """The time at which it changed last."""

    def set_wanted(self, policy: Policy, lives: Collection[LeaseLifecycle]) -> None:
        """Set how many leases each pool is to hold (`Pool.want`)."""
        places = policy.hosts_needed()
        wanted = leases_wanted(self._pools, policy.backlog_s(), policy.slots_without_lease(), places)
        held = Counter(life.pool.name for life in lives if life.phase in HELD)
        for pool in self._pools:
            # what works already is given back when it is idle, not before; and only work that waits needs more
            least = max(held[pool.name], pool.floor)
            most = wanted[pool.name] if policy.has_waiting or places else least + len(pool.queued)
            pool.want = max(min(wanted[pool.name], most), least)

    def may_grow(self, policy: Policy, lives: Collection[LeaseLifecycle], now: float) -> bool:
        """Return whether another lease may come that the work has a use for. If only shapes are left that need another
        machine, we wait PLACE_S for it."""
        state = policy.state
        settled = state.tuned + state.failed
        if settled != self._settled or not policy.hosts_needed() or state.running:
            self._last_change = now
            self._settled = settled
        if now - self._last_change >= PLACE_S:
            return False
        staying = Counter(life.pool.name for life in lives if life.phase in HELD and not life.is_draining)
        return any(not pool.hopeless and (pool.queued or staying[pool.name] < pool.maximum) for pool in self._pools)


def leases_wanted(pools: Sequence[Pool], backlog_s: float, other_slots: int = 0, places: int = 0) -> dict[str, int]:
    """Leases that each pool should hold, earlier pools filled first.

    `backlog_s`: estimated seconds on one slot of all unsettled shapes. `other_slots`: those of nodes without a lease
    that take work now or soon. `places`: leases that must be there whatever the backlog is, because shapes await
    confirmation on another machine.
    """
    left_s = backlog_s - other_slots * LEASE_WORK_S
    wanted = {}
    for pool in pools:
        lease_s = pool.slots * LEASE_WORK_S
        for_work = ceil(left_s / lease_s) if left_s > 0 else 0
        count = min(pool.maximum, max(for_work, places))
        wanted[pool.name] = count
        left_s -= count * lease_s
        places -= count
    return wanted
