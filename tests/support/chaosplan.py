"""Mishaps of a run on three nodes, drawn from a seed: for tests/fleet/test_chaos.py.

One node (`haven`) always comes back at once, and there is a way to tune every innocent shape.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

GROUPS, PER_GROUP = 100, 2
SHORT = ("cut", "kill_worker", "restart_dockerd")
"""Mishaps that last no longer than it takes to do them."""
LONG = ("no_sshd", "partition", "pause", "power", "full_disk")
CONTROLLER = "controller"
POISON = {"abort": "fault", "exit": "fault", "error": "error", "oom": "oom"}
"""The replay tuner's faults, and the reason that a shape fails with."""
VERDICTS = {"no_candidate": "no_candidate", "wrong": "wrong_result"}


@dataclass(frozen=True, slots=True)
class Mishap:
    """One thing that happens once a share `at` of all shapes is settled. `seconds` None: for good."""

    at: float
    kind: str
    node: str = ""
    seconds: float | None = 0.0


@dataclass(frozen=True, slots=True)
class Chaos:
    """All that goes wrong. `guilty`: shapes (MxNxK) that fail by right, with their reasons."""

    seed: int
    haven: str
    mishaps: tuple[Mishap, ...]
    faults: tuple[dict[str, Any], ...]
    guilty: dict[str, str]
    sick: str = ""
    """A node whose slot faults a few times although its canary passes."""


def draw(seed: int, nodes: tuple[str, ...] = ("h1", "h2", "h3"), groups: int = GROUPS) -> Chaos:
    """The same seed always draws the same. `groups`: number of groups of PER_GROUP shapes."""
    rng = random.Random(seed)
    haven = rng.choice(nodes)
    others = [n for n in nodes if n != haven]
    mishaps = [Mishap(rng.uniform(0.05, 0.8), rng.choice(SHORT), rng.choice(nodes)) for _ in range(rng.randint(1, 3))]
    # a node has one long mishap at a time, and so at most one
    for node in rng.sample(others, rng.randint(1, 2)):
        mishaps.append(_long(rng, node))
    if rng.random() < 0.5:
        mishaps.append(Mishap(rng.uniform(0.1, 0.7), CONTROLLER, seconds=rng.uniform(0.5, 4.0)))
    shapes = [(m + 1, g + 1) for g in range(groups) for m in range(PER_GROUP)]
    rng.shuffle(shapes)
    faults: list[dict[str, Any]] = []
    guilty: dict[str, str] = {}
    for _ in range(rng.randint(0, 3)):
        kind = rng.choice([*POISON, *VERDICTS])
        faults.append({"kind": kind, "match": _match(guilty, shapes.pop(), {**POISON, **VERDICTS}[kind])})
    if rng.random() < 0.3:
        match = _match(guilty, shapes.pop(), "kills_nodes")
        faults.append({"kind": "kill_worker", "match": match})
    if rng.random() < 0.5:  # an intermittent one: innocent, and tuned in the end
        m, g = shapes.pop()
        match = {"M": str(m), "N": str(16 * g), "node": rng.choice(nodes)}
        faults.append({"kind": "abort", "match": match, "times": 1})
    sick = rng.choice(others) if rng.random() < 0.2 else ""
    if sick:
        faults.append({"kind": "abort", "match": {"node": sick}, "times": 4})
    elif rng.random() < 0.3:
        faults.append({"kind": "sick_canary", "match": {"node": rng.choice(others)}, "times": rng.randint(1, 2)})
    return Chaos(seed, haven, tuple(sorted(mishaps, key=lambda x: x.at)), tuple(faults), guilty, sick)


def _long(rng: random.Random, node: str) -> Mishap:
    kind = rng.choice(LONG)
    seconds: float | None = rng.uniform(2.0, 12.0)
    if kind == "power" and rng.random() < 0.3:
        seconds = None
    return Mishap(rng.uniform(0.05, 0.6), kind, node, seconds)


def _match(guilty: dict[str, str], shape: tuple[int, int], reason: str) -> dict[str, str]:
    m, g = shape
    guilty[f"{m}x{16 * g}x64"] = reason
    return {"M": str(m), "N": str(16 * g)}
