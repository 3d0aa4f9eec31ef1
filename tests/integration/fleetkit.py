"""Kit of the tests on three real nodes: the inventory, a run that has begun, readings of the nodes and of `explain`.

The fixtures `fleet` (one for the whole session) and `remote` are in conftest.py.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

from orchestrator.events import AttemptEnded, AttemptStarted, NodeJoined, Record
from orchestrator.paths import list_runs
from tests.integration.heavy import WORKER_IMAGE, HeavyFleet, HeavyNode, why_not
from tests.integration.kit import Bench
from tests.support.ledger_kit import per_node
from tests.waiting import PATIENCE_S, wait_until

ON_NODES = [pytest.mark.system, pytest.mark.skipif(bool(why_not()), reason=why_not()), pytest.mark.xdist_group("nodes")]
"""The pytestmark of modules that need the nodes."""

NAMES = ("h1", "h2", "h3")
USERS = ("root", "tuner", "tuner")
ESC = "\x1b"
OURS = "label=gemmfleet.run"


# --- before and after a test ------------------------------------------------------------------------------------------


def write_inventory(
    bench: Bench, fleet: HeavyFleet, names: tuple[str, ...] = NAMES, more: str = "", **nodes: str
) -> None:
    """A slot a node. `more`: lines of defaults; `nodes`: what a node says itself, as a flow mapping."""
    image = "" if "image:" in more else f"  image: {WORKER_IMAGE}\n"
    config = "" if "ssh_config:" in more else f"  ssh_config: {fleet.folder}/ssh_config\n"
    bench.inventory.write_text(
        f"defaults:\n  tuner: replay\n  transport: ssh\n  engine: docker\n{image}{config}  gpus: 0\n{more}"
        "nodes:\n" + "".join(f"  {n}: {nodes.get(n, '{}')}\n" for n in names)
    )


def mend(node: HeavyNode) -> None:
    """Undo whatever a test did to a node, and remove what the run left there."""
    node.repair()
    node.remove_containers(OURS)
    node.sh("rm -rf /data/work /root/.gemmfleet /home/*/.gemmfleet")


# --- a run ------------------------------------------------------------------------------------------------------------


def begun(bench: Bench, n: int, *more: str, free: int = 0, faults: Sequence[dict[str, Any]] = (), **kw: Any) -> Any:
    """A tune of groups of one shape that has tuned n; what comes after the first `free` (n) waits for `release`."""
    before = len(list_runs(bench.runs))
    faults = [*faults, bench.held(max(n, free))]
    run = bench.start("tune", *bench.tune_args(more=more, faults=faults, **kw))
    wait_until(lambda: (len(list_runs(bench.runs)) > before and bench.tuned() >= n) or run.poll() is not None, "go")
    assert run.poll() is None, run.communicate()[0]
    return run


def release(fleet: HeavyFleet, bench: Bench, *names: str) -> None:
    """Let what is held go on, on all nodes or on some; not through the network."""
    for node in fleet.nodes:
        if not names or node.name in names:
            for folder in (node_folder(bench, node), f"/data/work/{bench.paths.run}/{node.name}"):
                node.sh(f"if [ -d {folder} ]; then touch {folder}/released; fi")


def finish_released(fleet: HeavyFleet, bench: Bench, run: Any) -> str:
    """Release what is held and wait for the end; return the command's output."""
    release(fleet, bench)
    return finish(run)


def finish(run: Any) -> str:
    """Wait for a command's end and return its output."""
    out, _ = run.communicate(timeout=PATIENCE_S)
    # one of ours, not one that is quoted from a tuner's log
    assert not any(line.startswith("Traceback") for line in out.splitlines()), out
    assert ESC not in out, out
    return str(out)


def settled(
    fleet: HeavyFleet, bench: Bench, tuned: int, failed: dict[str, str] | None = None, left: tuple[str, ...] = ()
) -> None:
    """The books are right and no worker is left. `left`: nodes that were given up, where some may be."""
    bench.check_books(tuned=tuned, failed=failed or {})
    assert {x.partition(":")[0] for x in running(fleet, bench)} <= set(left)


# --- what the nodes tell ----------------------------------------------------------------------------------------------


def running(fleet: HeavyFleet, bench: Bench) -> list[str]:
    """Containers of the run that run, on all nodes, as NODE:NAME."""
    flt = f"{OURS}={bench.paths.run}"
    return [f"{n.name}:{name}" for n in fleet.nodes for name in n.containers(flt, "status=running")]


def containers(fleet: HeavyFleet) -> list[str]:
    """Containers of ours on all nodes, dead ones too."""
    return [name for n in fleet.nodes for name in n.containers(OURS)]


def home(node: HeavyNode) -> str:
    """The home folder of the node's user."""
    return "/root" if node.user == "root" else f"/home/{node.user}"


def node_folder(bench: Bench, node: HeavyNode) -> str:
    """The run's folder on the node."""
    return f"{home(node)}/.gemmfleet/{bench.paths.run}/{node.name}"


def measured(bench: Bench, node: HeavyNode) -> int:
    """Shapes that the node's workers have tuned so far, whoever has heard of it."""
    return int(node.sh(f"cat {node_folder(bench, node)}/events/*.jsonl | grep -c '\"shape_tuned\"' || true"))


def docker_log(node: HeavyNode, event: str, since: float) -> list[float]:
    """Times of an event (`die`, `oom`) of our containers, from the node's Docker."""
    out = node.sh(
        f"docker events --since {int(since)} --until {int(time.time()) + 1} --filter event={event} "
        f"--filter {OURS} --format '{{{{.TimeNano}}}}'"
    )
    return [int(line) / 1e9 for line in out.split()]


# --- what the run tells -----------------------------------------------------------------------------------------------


def by_node(bench: Bench) -> dict[str, int]:
    """Shapes tuned, by node."""
    with bench.ledger() as ledger:
        return per_node(ledger)


def journal(bench: Bench, kind: type[Record]) -> list[tuple[float, Any]]:
    """Records of a kind, with their times."""
    with bench.ledger() as ledger:
        return [(t, r) for t, r in ledger.journal_records() if isinstance(r, kind)]


def steps(bench: Bench, what: str, *kinds: str) -> list[dict[str, Any]]:
    """Steps of `explain WHAT --json`, of some kinds."""
    (story,) = bench.run("explain", what, "--json").json()["stories"]
    return [s for s in story["steps"] if not kinds or s["kind"] in kinds]


def troubled(bench: Bench, node: str, at: float) -> list[dict[str, Any]]:
    """The steps in which `explain NODE --json` says that it did not answer, since the injection."""
    told = [s for s in steps(bench, node, "trouble") if s["t"] >= at]
    assert told
    assert told[0]["text"].startswith(f"{node} is in trouble")
    return told


def joined(bench: Bench, node: str, at: float) -> bool:
    """Return whether the node has joined (again) since `at`."""
    return any(r.node == node and t >= at for t, r in journal(bench, NodeJoined))


def busy_slots(bench: Bench, node: str) -> int:
    """Attempts that the node's workers have begun and not ended, as far as the run knows."""
    over = {r.attempt for _, r in journal(bench, AttemptEnded)}
    begun = {r.attempt for _, r in journal(bench, AttemptStarted) if r.node == node}
    return len(begun - over)


def claimed(bench: Bench, node: HeavyNode) -> int:
    """Groups that workers of the node are at."""
    folder = node_folder(bench, node)
    return int(node.sh(f"find {folder}/claimed -type f | wc -l"))
