"""The AITER of each node, and the fixes that its files need, for `nodes check` and `--plan`.

The files come over the node's connection, or out of its image by one `docker create` and copies: no container is
started and nothing is pulled. `worker probe` then reads them on this machine as the worker will on the node.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path, PurePosixPath

from orchestrator.engine.docker_client import Docker
from orchestrator.engine.docker_options import container_options
from orchestrator.engines import find_engine
from orchestrator.errors import EngineError, OrchestratorError
from orchestrator.files.scratch import scratch_folder
from orchestrator.image.image_files import SILENCE_S, copy_out, unpack
from orchestrator.inventory.load import resolved
from orchestrator.inventory.model import Node
from orchestrator.machines.facts import NodeFacts
from orchestrator.machines.node_link import transport_to
from orchestrator.machines.node_poll import ask_all
from orchestrator.transport.base import connected
from worker import PACKAGE_PARENT
from worker.aiter_tree.locate import DEFAULT_GFX

LIMIT_S = 60.0
"""For all nodes together; `worker probe` itself needs half a second."""
UNKNOWN = "known when the worker starts"
MAX_BYTES = 64 << 20
"""Most bytes of a tree's files over a connection: without compiled kernels they have a few MB."""
KERNELS = ("f4gemm", "i8gemm", "bf16gemm")
"""Folders of hsa/<gfx> that show where a tree keeps its lists; all of hsa/ has hundreds of MB."""
_SCRIPTS = "csrc/ck_gemm_a4w4_blockscale"
_SEND = """\
cd -- "$1" 2>/dev/null || exit 0
[ -e aiter/jit/core.py ] || cd ..
shift
for part; do shift; [ ! -e "$part" ] || set -- "$@" "$part"; done
[ $# -eq 0 ] || tar -chf - --exclude='*.co' -- "$@" | head -c "$MOST"
"""


def aiter_lines(nodes: Iterable[Node], usable: Mapping[str, NodeFacts]) -> dict[str, str]:
    """One sentence for each usable node: its AITER's version and place, and the fixes that the files need. `usable`:
    the facts of these nodes; pools of leases have none yet."""
    questions = {node.name: partial(_aiter_on, node, usable[node.name]) for node in nodes if node.name in usable}
    answers = dict(ask_all(questions, LIMIT_S))
    return {name: answers[name] or f"AITER: {UNKNOWN}" for name in questions}


def _aiter_on(node: Node, facts: NodeFacts) -> str:
    if node.lease is not None:
        return f"AITER: {UNKNOWN}"
    chips = (chip for chip in (node.gfx, facts.gfx) if chip and chip.startswith("gfx"))
    gfx = next(chips, DEFAULT_GFX)
    try:
        with scratch_folder("gemmfleet-aiter-") as scratch:
            place = _fetch_files(node, facts, _parts(gfx), scratch)
            return _sentence(place, scratch, gfx) if place else f"AITER: {UNKNOWN}"
    except OrchestratorError as e:
        return f"AITER: {UNKNOWN} ({e.reason})"
    except (OSError, ValueError, tarfile.TarError, subprocess.SubprocessError) as e:
        return f"AITER: {UNKNOWN} (its files cannot be read: {e})"


def _parts(gfx: str) -> tuple[str, ...]:
    lists = (f"{hsa}/{name}" for hsa in ("hsa", f"hsa/{gfx}") for name in KERNELS)
    of_meta = [f"{above}{part}" for part in (_SCRIPTS, *lists) for above in ("", "aiter_meta/")]
    named = ("aiter/_version.py", "aiter/install_mode", ".git/HEAD", ".git/packed-refs")
    return ("aiter/jit/core.py", "aiter/utility", *named, *of_meta)


def _fetch_files(node: Node, facts: NodeFacts, parts: tuple[str, ...], folder: Path) -> str:
    """Copy the parts of the node's tree below `folder`; return the tree's place, "" if it is not known before a worker
    runs."""
    spec = find_engine(node.engine)
    real = resolved(node)
    if spec.runs_images and facts.values.get("image", "missing") != "missing":
        options = container_options(real, "")
        root = real.aiter.root
        places = [root, str(PurePosixPath(root).parent)] if root else None
        with (
            connected(transport_to(node)) as transport,
            contextlib.closing(Docker(transport, options, SILENCE_S)) as client,
        ):
            return (
                copy_out(client, options.image, folder, parts, places, options.volumes if root else ())["aiter"] or ""
            )
    place = real.aiter.root or facts.values.get("aiter_at", "")
    if spec.runs_images or spec.enter or not place:
        return ""
    with connected(transport_to(node)) as transport:
        script = f"MOST={MAX_BYTES}\n{_SEND}"
        done = transport.run(["sh", "-c", script, "sh", place, *parts], timeout=LIMIT_S)
    if not done.out:
        raise EngineError(node.name, f"no AITER is in {place}")
    with tarfile.open(fileobj=io.BytesIO(done.out), mode="r|") as tar:
        unpack(tar, folder)
    return place


def _sentence(place: str, folder: Path, gfx: str) -> str:
    """`AITER 0.1.10 in /opt/aiter needs asm_dir_symlink, k_trim; applied to a copy`."""
    argv = [sys.executable, "-m", "worker", "probe", "--json", "--aiter-root", str(folder), "--gfx", gfx]
    done = subprocess.run(argv, cwd=PACKAGE_PARENT, capture_output=True, timeout=LIMIT_S)
    if done.returncode != 0:
        raise ValueError(done.stderr.decode("utf-8", "replace").strip()[-300:])
    probe = json.loads(done.stdout)
    needed = [name for name, fix in probe["workarounds"].items() if fix["verdict"] == "needed"]
    fixes = f"needs {', '.join(needed)}; applied to a copy" if needed else "needs no fix"
    version = probe["tree"]["version"] or probe["tree"]["commit"][:10] or "of an unknown version"
    return f"AITER {version} in {place} {fixes}"
