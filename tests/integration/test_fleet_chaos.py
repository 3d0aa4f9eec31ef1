"""Five drawn mixtures of mishaps on three real nodes. More of them: `make soak`."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.integration.chaosrun import ChaosRun
from tests.integration.fleetkit import ON_NODES
from tests.integration.heavy import HeavyFleet
from tests.integration.kit import Bench
from tests.support.chaosplan import CONTROLLER, LONG, SHORT, draw

SEEDS = (1, 2, 3, 4, 5)


@pytest.mark.full
@pytest.mark.parametrize("seed", SEEDS)
def test_the_laws_hold_on_real_nodes(fleet: HeavyFleet, remote: Bench, seed: int) -> None:
    chaos = draw(seed)
    print(*chaos.lines(), sep="\n")
    ChaosRun(fleet, remote, chaos).go()


test_the_laws_hold_on_real_nodes.pytestmark.extend(ON_NODES)  # type: ignore[attr-defined]


def test_the_five_seeds_hold_many_kinds_of_mishap() -> None:
    """So that the test above means something."""
    kinds = Counter(m.kind for seed in SEEDS for m in draw(seed).mishaps)
    assert len(kinds) >= 7, kinds
    assert set(kinds) <= {*SHORT, *LONG, CONTROLLER}
    assert draw(1) == draw(1)
    assert any(draw(seed).guilty for seed in SEEDS)
