"""Winners ranked again on a second GPU: the draw, the figures of agreement and regret, and where they are shown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator import events as ev
from orchestrator.ledger import Ingest
from orchestrator.ledger.reader import reconcile
from orchestrator.results.export import Request, provenance
from orchestrator.results.second_gpu import drawn, figures, second_gpu_words, second_looks
from orchestrator.run.earlier import gather
from tests.support.ledger_kit import A8W8, Run, ended, row, started

A, B, C = ["kernel_a"], ["kernel_b"], ["kernel_c"]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with Run(tmp_path) as made:
        made.ingest = Ingest(made.ledger, twice={3})
        made.send("g0002-1")
        made.says(started("g0002-1"))
        yield made


def tuned(attempt: str, shape: int, kernel: str = "kernel_a", us: float = 10.0, **more: Any) -> dict[str, Any]:
    made = row("shape_tuned", attempt, shape, kernelName=kernel, us=us)
    return {**made, "candidate": [kernel], "runners": [B, C], **more}


def looked(run: Run, *said: dict[str, Any], node: str = "n2", **device: Any) -> None:
    """Shape 3 was tuned, and goes to a second slot, which says something."""
    run.says(tuned("g0002-1", 3))
    run.says(ended("g0002-1"))
    run.journal(ev.Confirm(3, "g0002", "g0002a", (("kernel_a",), ("kernel_b",)), (("n1", "0"),), "drawn", True))
    run.send("g0002a-1", node)
    begun = started("g0002a-1")
    run.says({**begun, "device": {**begun["device"], **device}}, *said, node=node)
    run.journal(ev.SettleShape(3, "g0002-1", True, f"ranked again on {node} slot 0 (g0002a-1)"))


def again(kernel: str, us: float) -> dict[str, Any]:
    return row("row", "g0002a-1", 3, kernelName=kernel, us=us, detail="ranked again")


def chosen(kernel: str, us: float) -> dict[str, Any]:
    return {**tuned("g0002a-1", 3, kernel, us), "ran": [A, B]}


def test_the_draw_is_the_share_of_the_shapes_and_follows_the_seed() -> None:
    shapes = list(range(1, 101))
    assert len(drawn(shapes, "run", 0.05)) == 5
    assert drawn(shapes, "run", 0.05) == drawn(list(reversed(shapes)), "run", 0.05)
    assert drawn(shapes, "run", 0.05) != drawn(shapes, "other", 0.05)
    assert [len(drawn(range(n), "run", 0.05)) for n in (0, 9, 10, 29, 30)] == [0, 0, 1, 1, 2]
    assert drawn(shapes, "run", 0.0) == frozenset()
    assert drawn(shapes, "run", 1.0) == frozenset(shapes)


def test_a_drawn_winner_settles_nothing_by_itself(run: Run) -> None:
    (event,) = run.says(tuned("g0002-1", 3))
    assert event == ev.ShapeTuned("g0002-1", 3, best=("kernel_a",), runners=(("kernel_b",), ("kernel_c",)))
    assert not event.settles
    assert run.ledger.counts().tuned == 0
    assert reconcile(run.ledger) == []


def test_others_do_and_name_no_runners_up(run: Run) -> None:
    run.send("g0001-1")
    run.says(started("g0001-1"))
    (event,) = run.says(tuned("g0001-1", 1))
    assert event == ev.ShapeTuned("g0001-1", 1, best=("kernel_a",))
    assert run.ledger.counts().tuned == 1
    one_alone = {**tuned("g0001-1", 2), "runners": []}
    (event,) = run.says(one_alone)
    assert event == ev.ShapeTuned("g0001-1", 2, best=("kernel_a",))


def test_agreement(run: Run) -> None:
    looked(run, again("kernel_b", 9.9), again("kernel_a", 9.0), chosen("kernel_a", 9.0))
    (look,) = second_looks(run.ledger)
    assert (look.first, look.second, look.agreed, look.regret) == (("n1", "0"), ("n2", "0"), True, 0.0)
    assert run.ledger.counts().tuned == 1
    assert [w.attempt for w in run.ledger.winners()] == ["g0002-1"]
    words = (
        "1 of 1 winner ranked again on a second GPU came first there, too; regret 0.0 % in the median, 0.0 % at most"
    )
    assert second_gpu_words([look]) == words


def test_regret_is_measured_in_the_second_session(run: Run) -> None:
    """The first GPU's 10 us have no part in it."""
    looked(run, again("kernel_a", 30.0), again("kernel_a", 22.0), chosen("kernel_b", 20.0))
    (look,) = second_looks(run.ledger)
    assert not look.agreed
    assert look.regret == pytest.approx(0.1)
    found = figures([look])
    assert (found["asked"], found["judged"], found["agreed"]) == (1, 1, 0)
    assert found["largest_regret"] == pytest.approx(0.1)
    assert "regret 10.0 % in the median, 10.0 % at most (3x64x128)" in second_gpu_words([look])


def test_what_cannot_be_judged_is_said_and_counted(run: Run) -> None:
    looked(run)
    (look,) = second_looks(run.ledger)
    assert (look.regret, look.why) == (None, "no second GPU ranked it")
    assert second_gpu_words([look]) == "1 winner drawn to be ranked on a second GPU, and none could be"
    assert figures([look])["median_regret"] is None
    assert second_gpu_words([]) == ""


def test_a_gpu_of_another_kind_judges_nothing(run: Run) -> None:
    looked(run, again("kernel_a", 22.0), chosen("kernel_b", 20.0), gfx="gfx942", cu_num=304)
    (look,) = second_looks(run.ledger)
    assert (look.regret, look.why) == (None, "the second GPU is of another kind")


def test_provenance_has_the_figures_and_the_shapes(run: Run) -> None:
    looked(run, again("kernel_a", 22.0), chosen("kernel_b", 20.0))
    document = json.loads(json.dumps(provenance(run.ledger, Request("r", 0.0))))
    assert document["second_gpu"]["largest_regret"] == pytest.approx(0.1)
    assert document["second_gpu"]["shapes"][0]["other"] == "kernel_b"


def test_the_cost_model_learns_nothing_from_an_attempt_on_some_candidates(tmp_path: Path) -> None:
    (tmp_path / "r1").mkdir()
    with Run(tmp_path / "r1") as run:
        run.ingest = Ingest(run.ledger, twice={3})
        run.send("g0002-1")
        run.says(started("g0002-1"), row("row", "g0002-1", 3))
        looked(run, again("kernel_a", 22.0), chosen("kernel_b", 20.0), ended("g0002a-1"))
    assert [s.shapes for s in gather(tmp_path, A8W8, "replay").samples] == [1]
