"""The numbers of the policy, in one place. Times in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """Defaults are for groups of seconds to minutes."""

    groups_ahead: int = 2
    """Unclaimed groups a ready slot that a node always has, while there are any."""
    seconds_ahead: float = 120.0
    """Estimated work ahead of a slot, where that is more than `groups_ahead` groups (and no more than its share)."""
    most_ahead: int = 50
    """Unclaimed groups a ready slot at most, however cheap they are."""
    max_tries: int = 6
    """Tries of a shape in all; a net below the rules of blame, so that nothing goes on for ever."""
    losses_alone: int = 2
    """After so many losses a shape runs alone."""
    losses_fatal: int = 3
    """After so many it is failed as `kills_nodes`."""
    stranded: int = 3
    """A group that lay unclaimed on so many lost nodes counts as one that may have been started there."""
    marks: int = 3
    """Faults of shapes that passed elsewhere since, that put a slot into quarantine ..."""
    mark_shapes: int = 2
    """... when they are of so many distinct shapes."""
    fisher_p: float = 0.001
    """Where enough candidates ran, three that ran elsewhere put a slot into quarantine only if so many more faulted on
    it than elsewhere would be at most so likely by chance (Fisher, one-sided) ..."""
    few_trials: int = 60
    """... with fewer on the slot or elsewhere the three are enough."""
    confirm_rounds: int = 4
    """Incomplete results of a shape, after which it is settled as unconfirmed."""
    confirm_misses: int = 2
    """Attempts to confirm that ended badly, after which it is."""
    first_cool_down_s: float = 5.0
    """Instead, for a slot that never passed a canary: a wrong interpreter or image should be known in seconds."""
    cool_down_s: float = 60.0
    """The first quarantine of a slot; doubled each time until a shape is tuned there."""
    max_cool_down_s: float = 1800.0
    max_strikes: int = 3
    """A slot that was quarantined so often in a row is no hope for a fleet that has nothing else."""
    canary_timeout_s: float = 300.0
    """A canary that was asked for and not answered for so long counts as failed."""
    verdict_timeout_s: float = 60.0
    """A shape is not failed before the slot's canary after the last fault is known, or so long has gone by."""
    small_fleet: int = 3
    """With fewer usable nodes left, what was in flight on a lost node runs by itself at once, after all other work."""
