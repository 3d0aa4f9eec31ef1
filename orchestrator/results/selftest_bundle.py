"""The bundle of `gemmfleet selftest`: what a trial left, without the names of hosts, users, images and paths.

A user sends it to us, so nothing in it may tell whose machine it was.
"""

from __future__ import annotations

import io
import json
import re
import socket
import tarfile
from collections.abc import Callable
from pathlib import Path

from orchestrator.inventory.references import value_hider
from orchestrator.pages import Document
from orchestrator.results.selftest_trial import NodeTrial

GENERIC = {"root", "localhost", "local", "/", "."}
"""Names that tell nothing about their owner."""
ADDRESS = re.compile(
    r"[\w.+-]+@[\w.-]+|(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.])|(?<=<host>)(?!\.log\b)(?:\.[A-Za-z0-9-]+)+"
)
"""`user@host`, an IPv4 address, or the domain behind a host's name that was replaced: `.lan.example` in
`<host>.lan.example`, but not `.log` in `<host>.log`."""
PATH = re.compile(
    r"(?:<path>|(?<![\w.<>/~$})-])~?/(?!dev/|sys/|proc/|opt/rocm)(?=[\w.+@%~<-]))"
    r"(?:(?!/(?:site|dist)-packages/)(?:<\w+>|[^\s\"'`\\,;:()<>|=\[\]{}]))*"
)
"""An absolute path, up to the folder of Python's packages if it has one: `/home/me/x.csv`, and `/opt/py/lib` in
`/opt/py/lib/site-packages/aiter/jit`. Paths of the system stay, such as `/dev/kfd` and `/opt/rocm/bin`."""
MOST_CHARACTERS = 4 << 20
"""Characters of a file that are packed: its last ones."""


def make_scrubber(trial: NodeTrial) -> Callable[[str], str]:
    """A function that replaces the names that the node's inventory and its check gave, as `<host>`, `<user>`, `<image>`
    and so on. Absolute paths and addresses are replaced even if nobody named them."""
    node = trial.node
    facts: Document = {}
    for checked in trial.steps["nodes"].document.get("nodes", ()):
        facts |= checked["facts"]
    places = (node.name, node.host, node.proxy_jump, socket.gethostname(), facts.get("host"))
    hosts = [str(place) for place in places if place]
    words = {
        "run": (facts.get("workdir"), node.workdir, trial.folder),
        "path": (trial.inventory, trial.inventory.name, trial.inventory.stem, Path.home(), Path.cwd()),
        "host": (*hosts, *(host.partition(".")[0] for host in hosts)),
        "image": (node.image,),
        "user": (node.user, facts.get("user"), Path.home().name),
        "aiter": (node.aiter.root,),
    }
    known: dict[str, str] = {}
    for word, names in words.items():
        known |= {str(name).lower(): f"<{word}>" for name in names if name}
    longest_first = sorted(known.keys() - GENERIC, key=len, reverse=True)
    any_name = "|".join(map(re.escape, longest_first))
    pattern = re.compile(f"(?<![A-Za-z0-9])(?:{any_name})(?![A-Za-z0-9])", re.IGNORECASE)
    mask = value_hider(node.options())

    def scrub(text: str) -> str:
        text = pattern.sub(lambda match: known[match[0].lower()], mask(text))
        return PATH.sub("<path>", ADDRESS.sub("<address>", text))

    return scrub


def write_bundle(trial: NodeTrial, outcome: str, to: Path) -> None:
    """Write the bundle: the outcome, facts of the GPUs, rows and logs, all scrubbed. Raises OSError."""
    gpus = []
    for node in trial.steps["nodes"].document.get("nodes", ()):
        gpus += [gpu | {"id": "", "pci": ""} for gpu in node["gpus"]]
    texts = {"selftest.json": outcome, "gpus.json": json.dumps(gpus, indent=1)}
    for path in sorted(trial.folder.rglob("*")):
        if path.suffix in (".csv", ".log") or path.name == "provenance.json":
            texts[str(path.relative_to(trial.folder))] = path.read_text(errors="replace")
    scrub = make_scrubber(trial)
    with tarfile.open(to, "w:gz") as archive:
        for name, text in texts.items():
            data = scrub(text[-MOST_CHARACTERS:]).encode("utf-8", "replace")
            member = tarfile.TarInfo(scrub(name))
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
