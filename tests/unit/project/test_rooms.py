"""Imports go one way: every room imports only rooms below it, and of the worker what both sides share; a record of the
journal is interpreted in one place."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.events import RECORD_TYPES, CanaryTimed, Event, Tick
from orchestrator.policy import attempt_changes, node_changes, shape_changes, slot_changes
from tests.kits.worker import interpreters
from tests.paths import ROOT

ORDER = (
    "ground", "files", "transport", "tables", "shapes", "inventory", "engine", "planning", "policy", "ledger",
    "view", "configs", "results", "publish", "machines", "leases", "controller", "bench", "report", "image", "cli",
)  # fmt: skip
"""Rooms of the controller from the bottom to the top; `ground`: the modules beside them."""
SHARED = (
    "worker", "worker.registry", "worker.families", "worker.protocol", "worker.text", "worker.device", "worker.capture",
    "worker.foreign", "worker.aiter_tree", "worker.triton_configs",
    "worker.tuners.catalog", "worker.tuners.aiter_triton", "worker.tuners.engines",
)  # fmt: skip
"""Rooms of the worker that the controller may import; `worker`: the package itself, for the place of its files;
`tuners.aiter_triton`, `tuners.engines`: their compile stages need no GPU, and check configs on the controller's
cores."""

BASE = (
    "worker.families", "worker.registry", "worker.protocol", "worker.text", "worker.tuners.base",
    "worker.tuners.catalog",
)  # fmt: skip
ON_A_NODE = (*BASE, "worker", "worker.device", "worker.conditions", "worker.tuners.common")
WORKER: dict[str, tuple[str, ...]] = {
    "worker": (),
    "worker.text": (),
    "worker.registry": ("worker.text",),
    "worker.families": ("worker.text",),
    "worker.protocol": ("worker.families", "worker.registry", "worker.text"),
    "worker.foreign": ("worker.text", "worker"),
    "worker.aiter_tree": ("worker.families", "worker.foreign", "worker.text"),
    "worker.triton_configs": ("worker.foreign", "worker.text"),
    "worker.device": ("worker.text", "worker.protocol", "worker.aiter_tree"),
    "worker.conditions": ("worker.device",),
    "worker.process": ("worker.text", "worker.protocol"),
    "worker.tuners": (),
    "worker.tuners.base": ("worker.families", "worker.protocol", "worker.text"),
    "worker.tuners.catalog": ("worker.registry", "worker.families", "worker.tuners.base"),
    "worker.tuners.common": (*BASE, "worker", "worker.device", "worker.process"),
    "worker.tuners.torch": (*ON_A_NODE, "worker.process"),
    "worker.tuners.search": (*ON_A_NODE, "worker.process", "worker.triton_configs"),
    "worker.tuners.aiter": (*ON_A_NODE, "worker.process", "worker.aiter_tree"),
    "worker.tuners.aiter_triton": (
        *ON_A_NODE, "worker.aiter_tree", "worker.triton_configs", "worker.tuners.aiter", "worker.tuners.search",
    ),
    "worker.tuners.engines": (*ON_A_NODE, "worker.triton_configs", "worker.tuners.search"),
    "worker.tuners.vllm": ("worker.tuners.engines",),
    "worker.tuners.sglang": ("worker.tuners.engines",),
    "worker.tuners.replay": ON_A_NODE,
    "worker.tuners.bench": (*BASE, "worker.bench"),
    "worker.agent": (*ON_A_NODE, "worker.process"),
    "worker.capture": ("worker.process",),
    "worker.bench": (
        *ON_A_NODE, "worker.process", "worker.agent", "worker.aiter_tree", "worker.triton_configs",
        "worker.tuners.aiter", "worker.tuners.search", "worker.tuners.torch",
    ),
}  # fmt: skip
"""Room of the worker -> rooms that it may import; `worker.__main__` may import all."""
NEW_TUNER = (*ON_A_NODE, "worker.process")
"""Rooms that a tuner may import which is not listed there."""


def room_of(module: str) -> str:
    """Room of a dotted module."""
    parts = module.split(".")
    if parts[0] == "orchestrator":
        return parts[1] if len(parts) > 1 and (ROOT / "orchestrator" / parts[1]).is_dir() else "ground"
    depth = 3 if parts[:2] == ["worker", "tuners"] else 2
    return ".".join(parts[:depth])


def may_import(room: str) -> frozenset[str]:
    """Rooms that a room may import."""
    if room.startswith("worker"):
        is_tuner = room.startswith("worker.tuners.")
        return frozenset(WORKER.get(room, NEW_TUNER) if is_tuner else WORKER[room])
    return frozenset((*ORDER[: ORDER.index(room)], *SHARED))


def imported_modules(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted module of ours) of every import in a file, those within functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, a.name) for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                below = ROOT / node.module.replace(".", "/") / alias.name
                is_module = below.is_dir() or below.with_suffix(".py").exists()
                yield node.lineno, f"{node.module}.{alias.name}" if is_module else node.module


def arrows() -> Iterator[tuple[str, str, str]]:
    """(room, imported room, file:line and module) of every import from one room into another."""
    for path in sorted((*(ROOT / "orchestrator").rglob("*.py"), *(ROOT / "worker").rglob("*.py"))):
        name = path.relative_to(ROOT)
        if name.name == "__main__.py":
            continue
        room = room_of(".".join(name.with_suffix("").parts))
        for line, module in imported_modules(path):
            if module.partition(".")[0] in ("orchestrator", "worker") and room_of(module) != room:
                yield room, room_of(module), f"{name}:{line} imports {module}"


def test_every_room_imports_only_the_rooms_below_it() -> None:
    wrong = [text for room, to, text in arrows() if to not in may_import(room)]
    assert not wrong, "\n".join(["imports against the order of rooms:", *wrong])


def test_the_worker_imports_nothing_of_the_controllers() -> None:
    assert not [text for room, to, text in arrows() if room.startswith("worker") and not to.startswith("worker")]


def test_the_page_shows_the_rooms_in_their_order() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text().partition("## The house")[2]
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == [r for r in reversed(ORDER) if r != "ground"]


MOST = 5
"""Modules that name a record: its definition, the policy's module that applies it, what makes it, and at most two that
carry it out or read it."""
APPLY = "orchestrator/policy/apply.py"
APPLIERS = (attempt_changes, node_changes, shape_changes, slot_changes)
"""The modules that apply.py names: the only ones that change the state for a record. `Tick` changes nothing."""


def modules_by_record() -> dict[str, set[str]]:
    """The modules that name each record, by the record's name."""
    named: dict[str, set[str]] = defaultdict(set)
    for path in (ROOT / "orchestrator").rglob("*.py"):
        module = str(path.relative_to(ROOT))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "orchestrator.events":
                for alias in node.names:
                    named[alias.name].add(module)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ev":
                named[node.attr].add(module)
    return named


def test_a_record_is_named_in_few_modules() -> None:
    named = modules_by_record()
    for name in RECORD_TYPES:
        known = {*named[name], "orchestrator/events.py"}
        assert len(known) <= MOST, f"{name} is named in {sorted(known)}"


def test_a_record_is_applied_in_one_module_of_those_that_apply_names() -> None:
    appliers = {f"orchestrator/policy/{module.__name__.rpartition('.')[2]}.py" for module in APPLIERS}
    applied = Counter(record for module in APPLIERS for record in module.CHANGES)
    assert applied == Counter(set(RECORD_TYPES.values()) - {Tick})
    named = modules_by_record()
    for name, record in RECORD_TYPES.items():
        if issubclass(record, Event) and record not in (Tick, CanaryTimed):  # the state keeps timed canaries
            policy = {module for module in named[name] if module.startswith("orchestrator/policy/")} - {APPLY}
            assert len(policy) == 1, f"{name} is named in {sorted(policy)}"
            assert policy <= appliers, f"{name} is named in {sorted(policy)}"


# a tuner may import what it needs, and so may a backend of bench
IMPORT_ALL = """
import importlib, pkgutil, sys
sys.modules["orchestrator"] = None
import worker
for module in pkgutil.walk_packages(worker.__path__, "worker.", onerror=lambda name: None):
    tuner = module.name.split(".")[2:] if module.name.startswith("worker.tuners.") else []
    if tuner[:1] in ([], ["base"], ["catalog"], ["replay"]) and module.name not in (
        "worker.bench.backends", "worker.bench.torch_backend", "worker.bench.measuring", "worker.__main__"
    ):
        importlib.import_module(module.name)
import worker.__main__
foreign = {m.split(".")[0] for m in sys.modules} - set(sys.stdlib_module_names) - {"worker", "orchestrator", "__main__"}
print(*(m for m in sorted(foreign) if not getattr(sys.modules.get(m), "__name__", m).startswith("_")))
"""


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_it_imports_the_standard_library_only(version: str) -> None:
    python = interpreters().get(version)
    if python is None:
        pytest.skip(f"python{version} is not installed")
    done = subprocess.run([python, "-S", "-c", IMPORT_ALL], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr
