"""`status` asks the nodes themselves. It shows their answers, and does not wait for a silent node."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Iterator

import pytest

from tests.integration.heavy import WORKER_IMAGE, HeavyFleet, why_not
from tests.integration.heavy.gpu import a_gpu, gpu_says
from tests.integration.sshd import light_fleet
from tests.kits.fleet import Bench
from tests.waiting import PATIENCE_S, wait_until


@pytest.mark.skipif(shutil.which("ssh") is None, reason="needs the OpenSSH client")
def test_a_refusing_node_is_told_at_once_and_the_result_files_are_there(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(slots=1)
    bench.shapes(groups=2)
    assert bench.tune().code == 0
    inventory = bench.paths.inventory
    inventory.write_text(
        inventory.read_text() + "  refuses: {transport: ssh, host: 127.0.0.1, port: 1, gpus: 0, gfx: cpu, cu_num: 1}\n"
    )
    status = bench.run("status", "--json").json()
    here, refuses = status["nodes"]
    assert (here["live"]["error"], here["live"]["gpus"], here["live"]["containers"]) == ("", [], [])
    assert len(here["live"]["load"]) == 3
    assert "refused the connection" in refuses["live"]["error"]
    assert status["state"] == "finished"
    assert {f["path"].rsplit("/", 1)[-1] for f in status["files"]} >= {"tuned.csv", "profile.csv", "provenance.json"}
    shown = bench.run("status").out
    assert all(words in shown for words in ("here ", "refuses ", "tuned.csv")), shown


@pytest.mark.system
def test_a_slow_node_is_not_called_unreachable(make_bench: Callable[..., Bench]) -> None:
    """Slow: it lets us in and answers nothing. Unreachable: it takes the connection, as a kernel does, and no more."""
    bench = make_bench(slots=1)
    bench.shapes(groups=1)
    assert bench.tune().code == 0
    with light_fleet() as fleet, socket.create_server(("127.0.0.1", 0)) as mute:
        node = fleet.add("ForceCommand sleep 600")
        options = f"transport: ssh, ssh_config: {fleet.config}, gpus: 0, gfx: cpu, cu_num: 1"
        with bench.paths.inventory.open("a") as inventory:
            for name, (host, port) in {"busy": (node.address, node.port), "mute": mute.getsockname()}.items():
                inventory.write(f"  {name}: {{host: {host}, port: {port}, {options}}}\n")
        live = {n["name"]: n["live"] for n in bench.run("status", "--timeout", "10", "--json").json()["nodes"]}
    assert (live["busy"]["slow"], live["mute"]["slow"]) == (True, False), live
    assert (
        "no answer within 10 s, though it accepted the connection; --timeout gives it longer" in live["busy"]["error"]
    )
    assert live["mute"]["error"] == "no answer within 10 s"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HeavyFleet]:
    fleet = HeavyFleet(tmp_path_factory.mktemp("fleet"))
    fleet.start(3, users=("tuner", "root", "root"))
    a_gpu(fleet.nodes[0], mem_info_vram_used="0", mem_info_vram_total="309220868096")
    yield fleet
    fleet.stop()


@pytest.mark.xdist_group("status")
@pytest.mark.system
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_what_gpus_and_containers_do_is_shown_while_others_say_nothing(
    fleet: HeavyFleet, make_bench: Callable[..., Bench]
) -> None:
    """h1 works and is sick, h2 refuses, h3 is silent."""
    bench = make_bench()
    bench.inventory.write_text(
        f"defaults:\n  tuner: replay\n  transport: ssh\n  engine: docker\n  image: {WORKER_IMAGE}\n"
        f"  ssh_config: {fleet.folder}/ssh_config\nnodes:\n"
        "  h1: {gpus: [0]}\n  h2: {gpus: 0}\n  h3: {gpus: 0}\n"
    )
    bench.shapes(groups=200)
    bench.start("tune", *bench.tune_args(seconds=0.5))
    wait_until(lambda: bench.tuned() >= 3, "it runs")
    h1, h2, h3 = fleet.nodes
    h1.sh(f"docker run -d --name theirs --network none --entrypoint sleep {WORKER_IMAGE} 600")
    gpu_says(
        h1, gpu_busy_percent="97", mem_info_vram_used="12884901888", ras__umc_err_count="ue: 2\\nce: 0",
        hwmon__hwmon1__temp2_input="68000", hwmon__hwmon1__temp2_label="junction",
    )  # fmt: skip
    h2.stop_sshd()
    h3.partition()
    try:
        limit = ("--timeout", "20")
        text = bench.start("status", *limit)  # meanwhile the same as JSON: each waits for h3
        status = bench.run("status", *limit, "--json").json()
        lines = text.communicate(timeout=PATIENCE_S)[0].splitlines()
        at = {
            name: next(i for i, line in enumerate(lines) if line.startswith(f"{name} ")) for name in ("h1", "h2", "h3")
        }
        assert max(at["h1"], at["h2"]) < at["h3"], "each is shown when it answers"
        assert "! uncorrectable errors: umc 2, 97 %, 12/288 GiB, 68 C" in lines[at["h1"]]
        assert "unreachable" in lines[at["h2"]]
        assert "refused" in lines[at["h2"]]
        assert "no answer within 20 s" in lines[at["h3"]]
        live = status["nodes"][0]["live"]
        (gpu,) = live["gpus"]
        assert (gpu["use_pct"], gpu["memory_used"], gpu["temperature_c"]) == (97, 12884901888, {"junction": 68.0})
        assert gpu["uncorrectable"] == {"umc": 2}
        mine = [c["name"] for c in live["containers"] if c["ours"] and c["slot"]]
        assert mine == [f"gemmfleet-{bench.paths.run}-h1-0"]
        assert [c["name"] for c in live["containers"] if not c["ours"]] == ["theirs"]
        watch = bench.start("status", "--watch", *limit)
        assert watch.stdout is not None
        while "h1: answers; GPU 0: uncorrectable errors: umc 2" not in (line := watch.stdout.readline()):
            assert line, "the watch ended"
    finally:
        h3.heal()
        h2.start_sshd()
    assert bench.run("cancel").code == 0
