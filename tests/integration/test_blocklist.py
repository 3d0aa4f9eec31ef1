"""`nodes blocklist` over the transports: lists of this machine's runs, and of a real sshd."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.integration.kit import Bench
from tests.integration.sshd import light_fleet
from worker.protocol.blocklist import BlocklistEntry, CandidateId, SlotIdentity
from worker.tuners.aiter.blocklist import Blocklist

HERE = SlotIdentity("0xabc", "sha256:0123456789abcdef", "amdgpu 6.14")


def fill(cache: Path, name: str = "key1") -> Path:
    """The lists of two images, the second's last line torn off."""
    now = time.time()
    for image, age in ((name, 60.0), (f"{name}-old", 30 * 24 * 3600.0)):
        path = cache / "aiter" / image / "blocklist.jsonl"
        for number in ("4", "5"):
            candidate = CandidateId(("gfx950", "256", "16", "512", "1024"), (number, "0", "_ZNx"))
            confirmed = number == "5" and image == name
            Blocklist(path, HERE).note(
                BlocklistEntry(
                    HERE, "a8w8", candidate, "fault", "Memory \x1b[31mfault", True, now - age, "gfx950", confirmed
                )
            )
        with path.open("a") as f:
            f.write('{"family": "a8w8", "torn')
    return path


@pytest.mark.full
def test_of_this_machine_shown_and_cleared(bench: Bench) -> None:
    bench.inventory.write_text("nodes:\n  a: {}\n  gone: {transport: ssh, host: 127.0.0.1, port: 1}\n")
    fill(bench.runs / ".cache")
    argv = ("nodes", "blocklist", "-i", str(bench.inventory))
    both = bench.run(*argv, "--json")
    assert both.code == 3, "one node cannot be asked"
    mine, gone = both.json()["nodes"]
    assert gone["fault"]
    assert [(e["candidate"][0], e["used"], e["confirmed"]) for e in mine["entries"]] == [
        ("4", "expired", False), ("5", "expired", False), ("4", "this slot", False), ("5", "confirmed", True)
    ]  # fmt: skip
    (entry,) = {(e["slot"], e["image"], e["driver"], e["family"], e["outcome"], e["detail"]) for e in mine["entries"]}
    assert entry == (*(HERE.slot, HERE.image, HERE.driver), "a8w8", "fault", "Memory fault")
    shown = bench.run(*argv, "--node", "a")
    assert shown.code == 0
    assert "kernelId=4 splitK=0 _ZNx" in shown.out
    assert "4 candidates on the blocklists of 1 node" in shown.out
    cleared = bench.run(*argv, "--node", "a", "--clear")
    assert "4 candidates cleared from the blocklists" in cleared.out
    assert "0 candidates on the blocklists" in bench.run(*argv, "--node", "a").out
    assert bench.run(*argv, "--node", "b").code == 2


@pytest.mark.system
def test_over_ssh(bench: Bench) -> None:
    with light_fleet() as fleet:
        fleet.up(1)
        (node,) = fleet.nodes
        work = bench.root / "work dir"
        fill(work / ".cache")
        bench.inventory.write_text(
            f"defaults: {{transport: ssh, ssh_config: {fleet.config}, workdir: '{work}'}}\n"
            f"nodes:\n  {node.name}: {{host: {node.address}, port: {node.port}}}\n"
        )
        argv = ("nodes", "blocklist", "-i", str(bench.inventory), "--json")
        assert [len(n["entries"]) for n in bench.run(*argv, "--clear").json()["nodes"]] == [4]
        assert [len(n["entries"]) for n in bench.run(*argv).json()["nodes"]] == [0]
