"""The numbers of the policy, each with its reason. Times are in seconds.

For results of the simulator see benchmarks/results/scheduling.md.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """Settings of the policy. Tests and benchmarks may change them; users cannot."""

    # supply
    ahead_s: float = 20.0
    """A slot with less work than this ahead of it gets more, so that a worker never waits for the link. More than that
    would only be taken back at the end. In the simulator 60 makes a night 3 to 4 % longer; 10 to 30 make no difference.
    """
    most_queued: int = 8
    """Most groups that wait in a slot's inbox, however short they are."""
    share: float = 1.2
    """A group gets at most 1/share of the work that is left for each slot (guided self-scheduling). Larger groups save
    set-ups; smaller ones make slots finish at the same time. The simulator shows no difference from 1.2 to 1.6."""
    floor_setups: float = 15.0
    """While each idle slot has more than this many set-ups of work left, no group is shorter than that. So set-ups cost
    at most 7 %. In the simulator 20 makes the end of a bad night longer, and 10 costs more set-ups."""
    share_apart: float = 1.6
    floor_apart: float = 2.5
    """The same two for a tuner whose processes each take one (N, K) and cannot be stopped early: larger groups would
    delay the end. In the simulator the worst run takes 1.6 times its bound with a share of 1.2, 1.19 times with 1.6."""
    hedge: float = 0.42
    """A unit longer than this share of a slot's whole work decides the length of the run, so it starts on two nodes.
    Otherwise losing one long shape may double a run. The median run gets 0.01 longer by it."""
    hedge_least_s: float = 60.0
    """Shorter units are never started twice: losing one costs little."""

    # shapes
    tries: int = 6
    """Most tries of a shape. This limit backs up the rules of blame, so that every run ends."""
    losses: int = 3
    """A shape fails after this many losses with it in flight. Two may be chance in a bad night, three hardly."""
    few_hosts: int = 3
    """With fewer hosts left, lost shapes run after all other work. Three nodes are enough to tune the rest."""
    lease_ends: int = 6
    """A shape fails after this many leases that ended with it in flight, even if it was not its fault."""
    fresh_after: int = 2
    """After this many such ends, the shape waits for a lease on which nothing has run yet, if one may come."""
    proof_s: float = 600.0
    """Longest wait until both slots where a shape faulted have tuned something else. A sick slot never does, and one
    shape may take minutes. With 120 s, slots that have just become sick blame a healthy shape in 1 bad night of 30."""
    came_with_s: float = 60.0
    """Bad ends this shortly before the end of a lease are part of it: a scheduler kills the processes first."""
    remeasure: float = 0.1
    """Most of a run's time, as a share, for second measurements of noisy winners. `retry --noisy` has no limit."""

    # slots
    streak_p: float = 1e-6
    """A slot is shut after several bad ends in a row, if the fault rate elsewhere explains them with at most this
    probability. A fixed limit of four shuts healthy slots if every fourth shape has a candidate that faults; 1e-5 shut
    one in 2 % of bad nights."""
    least_streak: int = 3
    """Fewest bad ends in a row for that."""
    faults_passed_elsewhere: int = 3
    """A slot is shut after this many faults of shapes (at least two) that passed elsewhere."""
    failed_canaries: int = 2
    """If the canary failed after a shape on this many nodes, the shape is to blame and not the slots."""
    first_cool_down_s: float = 5.0
    """First quarantine of a slot that never passed a canary. A wrong interpreter or image shows within seconds."""
    cool_down_s: float = 60.0
    """First quarantine of any other slot. It doubles each time until a shape is tuned there."""
    max_cool_down_s: float = 1800.0
    """Longest quarantine, so that a GPU that was reset by hand is back within half an hour."""
    max_quarantines: int = 3
    """After this many quarantines in a row, a run no longer waits for the slot."""
    canary_s: float = 300.0
    """A canary without an answer counts as failed after this time. The first import of torch may take minutes."""
    orphan_canary_s: float = 3600.0
    """The same limit if the slot was working when its node was lost: its worker may still be busy."""
