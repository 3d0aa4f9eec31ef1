"""What fits together: the rules over several options of a node, and the references of one resolved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from pydantic import ValidationError

from orchestrator.errors import InventoryError
from orchestrator.inventory.container import OWN_RENDER_NODE
from orchestrator.inventory.model import Defaults, Node, NodeOptions
from orchestrator.inventory.references import resolve

Place = tuple[str | int, ...]

_SSH_ONLY = ("host", "port", "user", "identity", "proxy_jump", "ssh_config")
_DOCKER_ONLY = ("image", "docker")


def conflicts_of_defaults(defaults: Defaults) -> Iterator[tuple[Place, str]]:
    """(place, what is wrong and what to do) of what `defaults` cannot say."""
    if defaults.host is not None:
        yield ("defaults", "host"), "a host is one node's: put it under the node, or leave it out and name the node so"


def conflicts(node: Node, options: NodeOptions) -> Iterator[tuple[Place, str]]:
    """(place, what is wrong and what to do) of a node whose options do not fit together.

    `options`: what the node says itself; what it inherits and does not need is no fault.
    """
    here: Place = ("nodes", node.name)
    said = options.model_fields_set
    if node.transport == "local":
        for option in _SSH_ONLY:
            if option in said and getattr(options, option) is not None:
                yield (*here, option), "is for transport: ssh, and this node's is local: set transport or drop it"
    if node.engine == "process":
        for option in _DOCKER_ONLY:
            if option in said and getattr(options, option) is not None:
                yield (*here, option), "is for engine: docker, and this node's is process: set engine or drop it"
    elif node.image is None:
        yield here, "engine: docker needs an image: add image: NAME:TAG, here or under defaults"
    if (node.gfx is None) != (node.cu_num is None):
        lacks = "cu_num" if node.cu_num is None else "gfx"
        yield here, f"gfx and cu_num go together: add {lacks}, or drop both and they are detected"
    if isinstance(node.numa, tuple):
        slots = node.gpus if isinstance(node.gpus, int) else None if node.gpus == "auto" else len(node.gpus)
        if slots is None:
            yield (*here, "numa"), "a list needs gpus: as a number or a list, so that it is known which slot is meant"
        elif len(node.numa) != max(1, slots):
            yield (*here, "numa"), f"has {len(node.numa)} entries for {max(1, slots)} slots: one NUMA node a slot"
    if node.engine == "docker" and node.gpus == 0 and OWN_RENDER_NODE in node.docker.devices:
        yield (*here, "gpus"), f"0 means no GPU, and docker.devices has {OWN_RENDER_NODE}: drop one of them"
    if node.docker.ipc == "none" and node.docker.shm_size is not None:
        yield (*here, "docker"), "ipc: none has no /dev/shm that shm_size could be for: drop one of them"


def check_references(nodes: Iterable[Node]) -> None:
    """Raise InventoryError with every reference of these nodes whose variable is not set, all at once."""
    faults: list[str] = []
    for node in nodes:
        try:
            resolved(node)
        except InventoryError as e:
            faults += e.faults
    if faults:
        raise InventoryError(list(dict.fromkeys(faults)))


def resolved(node: Node, environ: Mapping[str, str] | None = None) -> Node:
    """The node with every reference replaced, checked again. For use at once: keep and write the unresolved one.

    Raises InventoryError naming file, line, node and variable; no message holds a value.
    """
    values = resolve(node.options(), node.name, node.origin, environ)
    try:
        return Node.model_validate({**values, "name": node.name, "source": node.source, "origins": node.origins})
    except ValidationError as e:
        faults = []
        for detail in e.errors(include_url=False, include_input=False):
            path = ".".join(str(p) for p in detail["loc"])
            why = str(detail.get("ctx", {}).get("error") or detail["msg"])
            faults.append(f"{node.origin(path)}: node {node.name}: {path}, its references replaced, {why}")
        raise InventoryError(faults) from None
