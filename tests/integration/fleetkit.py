"""Kit of the tests on three real nodes: the inventory, a run that has begun, readings of the nodes and of `explain`.

The fixtures `fleet` (one for the whole session) and `remote` are in conftest.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.events import NodeJoined
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


def begun(bench: Bench, n: int, **kw: Any) -> Any:
    """A tune of groups of one shape that has tuned n; what comes after those waits for `release`."""
    before = len(list_runs(bench.runs))
    run = bench.start("tune", *bench.tune_args([bench.held(n)], **kw))
    wait_until(lambda: (len(list_runs(bench.runs)) > before and bench.tuned() >= n) or run.poll() is not None, "go")
    assert run.poll() is None, run.communicate()[0]
    return run


def finish_released(fleet: HeavyFleet, bench: Bench, run: Any) -> str:
    """Let what is held go on, not through the network, and wait for the end; return the command's output."""
    release(fleet, bench)
    return finish(run)


def release(fleet: HeavyFleet, bench: Bench) -> None:
    for node in fleet.nodes:
        for folder in (node_folder(bench, node), f"/data/work/{bench.paths.run}/{node.name}"):
            node.sh(f"if [ -d {folder} ]; then touch {folder}/released; fi")


def finish(run: Any) -> str:
    """Wait for a command's end and return its output."""
    out, _ = run.communicate(timeout=PATIENCE_S)
    # one of ours, not one that is quoted from a tuner's log
    assert not any(line.startswith("Traceback") for line in out.splitlines()), out
    assert ESC not in out, out
    return str(out)


def containers(fleet: HeavyFleet) -> list[str]:
    """Containers of ours on all nodes, dead ones too."""
    return [name for n in fleet.nodes for name in n.containers(OURS)]


def node_folder(bench: Bench, node: HeavyNode) -> str:
    """The run's folder on the node."""
    home = "/root" if node.user == "root" else f"/home/{node.user}"
    return f"{home}/.gemmfleet/{bench.paths.run}/{node.name}"


def measured(bench: Bench, node: HeavyNode) -> int:
    """Shapes that the node's workers have tuned so far, whoever has heard of it."""
    return int(node.sh(f"cat {node_folder(bench, node)}/events/*.jsonl | grep -c '\"shape_tuned\"' || true"))


def by_node(bench: Bench) -> dict[str, int]:
    """Shapes tuned, by node."""
    with bench.ledger() as ledger:
        return per_node(ledger)


def steps(bench: Bench, what: str, *kinds: str) -> list[dict[str, Any]]:
    """Steps of `explain WHAT --json`, of some kinds."""
    (story,) = bench.run("explain", what, "--json").json()["stories"]
    return [s for s in story["steps"] if not kinds or s["kind"] in kinds]


def joined(bench: Bench, node: str, at: float) -> bool:
    """Return whether the node has joined (again) since `at`."""
    return any(r.node == node and t >= at for t, r in bench.journaled(NodeJoined))


def claimed(bench: Bench, node: HeavyNode) -> int:
    """Groups that workers of the node are at."""
    return int(node.sh(f"find {node_folder(bench, node)}/claimed -name '*.json' | wc -l"))
