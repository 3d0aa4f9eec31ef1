"""Numbers of the policy, each with its reason. Times in seconds.

Where a reason names the simulator, see benchmarks/results/scheduling.md.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """Settings of the policy; a test or a benchmark may change them, a user does not."""

    # supply
    ahead_s: float = 20.0
    """A slot with less than this ahead of it is sent more. A worker must not wait for the link; more would only be
    taken back again at the end. In the simulator 60 makes a night 3 to 4 % longer, and 10 to 30 are alike."""
    most_queued: int = 8
    """Groups that wait in a slot's inbox at most, however short they are."""
    share: float = 1.2
    """A group gets at most one over so much of what is left for each slot (guided self-scheduling). Larger groups save
    set-ups, smaller ones even out the end; the simulator is flat between 1.2 and 1.6."""
    floor_setups: float = 15.0
    """No group is shorter than so many set-ups while more is left for each idle slot: set-ups cost at most 7 %.
    In the simulator 20 makes the end of a bad night longer, and 10 costs more set-ups."""
    share_apart: float = 1.6
    floor_apart: float = 2.5
    """The same two for a tuner whose processes hold one (N, K) and are left alone to their end: larger groups would
    hold up the end. In the simulator a share of 1.2 makes the worst run 1.6 times its bound, 1.6 1.19 times."""
    hedge: float = 0.42
    """A unit longer than this part of the whole work of a slot decides the length of the run: it starts on two nodes.
    Without it one long shape that is lost may double a run; the median rises by 0.01."""
    hedge_least_s: float = 60.0
    """No unit shorter than this is started twice: losing it costs little."""

    # shapes
    tries: int = 6
    """Tries of a shape in all: a limit behind the rules of blame, so that every run ends."""
    losses: int = 3
    """Losses with the shape in flight after which it fails: two may be chance in a bad night, three hardly."""
    few_hosts: int = 3
    """With fewer hosts left, shapes that were lost run after all other work: three nodes suffice to tune the rest."""
    lease_ends: int = 6
    """Leases that ended with the shape in flight, through no fault of its own, after which it fails."""
    fresh_after: int = 2
    """Such ends after which the shape waits for a lease on which nothing ran yet, if one may come."""
    proof_s: float = 600.0
    """Longest wait until both slots of a shape's faults tuned something else: a sick slot never does, and one shape may
    take minutes. With 120 s slots that had just fallen sick accuse an innocent in one bad night of thirty."""
    came_with_s: float = 60.0
    """Bad ends so shortly before a lease ended are part of that: a scheduler ends the processes first."""

    # slots
    row_p: float = 1e-6
    """A slot is shut after a row of bad ends that the rate of faults elsewhere explains with at most this probability.
    A fixed row of four shuts healthy slots where every fourth shape has a candidate that faults; 1e-5 shut one in 2 %
    of bad nights."""
    least_row: int = 3
    """Bad ends in a row that it takes at least."""
    marks: int = 3
    """Faults of at least two shapes that passed elsewhere, after which the slot is shut."""
    wedges: int = 2
    """Nodes on which the canary failed after a shape, after which the shape is at fault and not the slots."""
    first_cool_down_s: float = 5.0
    """First quarantine of a slot that never passed a canary: a wrong interpreter or image shows within seconds."""
    cool_down_s: float = 60.0
    """First quarantine of any other slot; doubled each time until a shape is tuned there."""
    max_cool_down_s: float = 1800.0
    """Longest quarantine: a GPU that was reset by hand is back within half an hour."""
    max_strikes: int = 3
    """Quarantines in a row after which a run does not wait for the slot any more."""
    canary_s: float = 300.0
    """A canary that is not answered for so long counts as failed: the first import of torch may take minutes."""
    adrift_s: float = 3600.0
    """The same where the slot was at work when its node was lost: its worker may still be at that."""
