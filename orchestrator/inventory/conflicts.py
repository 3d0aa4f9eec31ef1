"""Rules that cover several options of a node: values that are legal alone and do not fit together.

`load.py` calls `conflicts` for each node after the defaults are merged into it. A rule yields the path of the option
below the node, such as ("docker",), and a sentence with the way out; () stands for the node itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from orchestrator.engines import built_in, find_engine
from orchestrator.inventory.document import Loc
from orchestrator.inventory.model import For, Node, NodeOptions

_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,40}[a-z0-9])?\Z")

Conflict = tuple[Loc, str]
"""(path below the node, problem and way out)"""


def conflicts(node: Node, given: Mapping[str, Any]) -> Iterator[Conflict]:
    """Yield what does not fit together. `given`: the options that stand at the node itself, not in the defaults."""
    yield from _out_of_place(node, given)
    spec = find_engine(node.engine)
    yield from spec.conflicts(node)
    try:
        spec.parse_options(node.engine_options)
    except ValueError as e:
        yield ("engine_options",), str(e)
    yield from _conflicts_of_chip(node)
    yield from _conflicts_of_numa(node)
    if node.docker.ipc == "none" and node.docker.shm_size is not None:
        yield ("docker",), "ipc: none has no /dev/shm that shm_size could be for: drop one of them"
    if node.lease:
        yield from _conflicts_of_pool(node)
    if node.lease == "kubernetes":
        yield from _conflicts_of_pods(node)


def _conflicts_of_chip(node: Node) -> Iterator[Conflict]:
    if (node.gfx is None) != (node.cu_num is None):
        missing = "cu_num" if node.cu_num is None else "gfx"
        yield (), f"gfx and cu_num go together: add {missing}, or drop both and they are detected"


def _conflicts_of_numa(node: Node) -> Iterator[Conflict]:
    """A list of NUMA nodes has one for each slot."""
    if not isinstance(node.numa, tuple):
        return
    if node.gpus == "auto":
        form = "a number" if node.lease else "a number or a list"
        yield ("numa",), f"a list needs gpus: as {form}, so that it is known which slot is meant"
        return
    slots = max(1, node.gpus if isinstance(node.gpus, int) else len(node.gpus))
    if len(node.numa) != slots:
        yield ("numa",), f"has {len(node.numa)} entries for {slots} slots: one NUMA node a slot"


def _conflicts_of_pool(node: Node) -> Iterator[Conflict]:
    if node.transport != "local":
        way = "name the login node in via:" if node.lease == "slurm" else "drop transport: (or write transport: local)"
        yield ("transport",), f"a lease is reached by its scheduler and not by SSH: {way}"
    if isinstance(node.gpus, tuple):
        yield ("gpus",), "which GPUs a lease has is the scheduler's choice: give their number"


def _conflicts_of_pods(node: Node) -> Iterator[Conflict]:
    if node.gpus == "auto":
        yield ("gpus",), "a pod needs a number of GPUs (0: none)"
    if node.image is None:
        yield ("image",), "a pod needs an image: name one such as rocm/pytorch:latest"
    if node.engine != "process":
        what = f"a pod is a container already: drop engine: {node.engine}, the pod's image is `image:`"
        yield ("engine",), what
    if not _DNS_LABEL.match(node.name):
        what = "a pool of pods needs a name of small letters, digits and '-', at most 42: its pods are called so"
        yield (), what


def _out_of_place(node: Node, given: Mapping[str, Any]) -> Iterator[Conflict]:
    """Options that only apply to another value of the node's transport, lease or engine. Where they are inherited from
    the defaults, they are ignored."""
    needs = _needs(node.engine)
    for name, value in given.items():
        need = needs.get(name)
        if need is None or value is None or getattr(node, need.option) in need.values:
            continue
        beginning = f"is for {need.option}: {', '.join(need.values)}"
        actual = getattr(node, need.option)
        if need.option == "transport" and node.lease:
            what = f"{beginning}: the options of a login node stand under hosts:, and via: names it"
            yield (name,), what
        elif actual is None:
            leases = " or ".join(f"lease: {lease}" for lease in need.values)
            yield (name,), f"is for a pool of leases: add {leases}, or drop it"
        elif (node.lease, name) != ("kubernetes", "image"):  # a pod has an image, whatever its engine
            yield (name,), f"{beginning}, and this node's is {actual}: set {need.option} or drop it"


def _needs(engine: str) -> dict[str, For]:
    """Option -> the other option of the node that it depends on, and the values of that for which it applies."""
    needs = {}
    for name, field in NodeOptions.model_fields.items():
        for annotation in field.metadata:
            if isinstance(annotation, For):
                needs[name] = annotation
    engines: dict[str, list[str]] = {}
    for engine_name in dict.fromkeys((*built_in(), engine)):
        for section in find_engine(engine_name).sections:
            engines.setdefault(section, []).append(engine_name)
    return needs | {section: For("engine", tuple(names)) for section, names in engines.items()}
