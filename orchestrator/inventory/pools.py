"""Options of a node that stands for a pool of leases, which Slurm or Kubernetes grants, and what goes together."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from orchestrator.inventory.values import Fixed, Host, Jump, Label, Port, Private, User, Word, listed
from worker.text import plural

MAX_LEASES = 1000
_COUNT_RE = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4}))?\Z")
_TIME_RE = re.compile(r"(?:([0-9]+)d)?(?:([0-9]+)h)?(?:([0-9]+)m)?\Z")
_COUNT_RULE = "must be a number of leases such as 4, or a range such as 1-8: at least one, and not fewer at the end"
_TIME_RULE = "must be a time such as 4h, 90m or 1d12h"


def _count(value: Any) -> Any:
    if isinstance(value, tuple):
        return value
    found = _COUNT_RE.match(str(value)) if type(value) in (int, str) else None
    if found is None:
        raise ValueError(_COUNT_RULE)
    least, most = int(found[1]), int(found[2] or found[1])
    if not 1 <= least <= most <= MAX_LEASES:
        raise ValueError(_COUNT_RULE)
    return (least, most)


def _time(value: Any) -> Any:
    if type(value) is int:
        hint = f": YAML reads a time with colons as a number, here {value}" if value >= 60 else ""
        raise ValueError(f"{_TIME_RULE}{hint}")
    found = _TIME_RE.match(value) if isinstance(value, str) and value else None
    if found is None or not value_of(value):
        raise ValueError(_TIME_RULE)
    return value


def value_of(text: str) -> int:
    """Seconds of a time such as 4h, 90m or 1d12h."""
    found = _TIME_RE.match(text)
    assert found is not None
    days, hours, minutes = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60


Count = Annotated[
    tuple[int, int],
    BeforeValidator(_count),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": "^[0-9]+(-[0-9]+)?$"}]}),
]
Time = Annotated[str, BeforeValidator(_time), WithJsonSchema({"type": "string", "pattern": "^([0-9]+[dhm])+$"})]

_BOTH = ("count", "time", "cache")
_SLURM = ("via", "partition", "account", "extra")
_KUBERNETES = ("context", "namespace", "resource", "pod")


class LoginHost(BaseModel):
    """A host that commands are run on and nothing is tuned on, such as a cluster's login node."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    host: Host | None = None
    """Host name, address, or name in your SSH configuration; default: its name here."""
    port: Port | None = None
    """Port of its sshd; default: what your SSH configuration says, else 22."""
    user: User | None = None
    """Login name; default: what your SSH configuration says, else yours."""
    identity: Private | None = None
    """Private key file here; default: what your SSH configuration and your agent have."""
    proxy_jump: Jump | None = None
    """Hosts to go through, [USER@]HOST[:PORT] with ',' between; `none`: no hop, whatever the configuration says."""
    ssh_config: Private | None = None
    """SSH configuration file here to read instead of yours and the system's, as `ssh -F` does."""


class LeaseOptions(BaseModel):
    """Options of a pool of leases."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    lease: Literal["slurm", "kubernetes"] | None = None
    """The node is a pool of leases that Slurm or Kubernetes grants; default: a machine of its own."""
    count: Count = (1, 1)
    """Leases to start with and at most, such as 1-8; in between their number follows the work that is left."""
    time: Time = "4h"
    """Time limit of a lease, such as 4h, 90m or 1d12h."""
    cache: Fixed | None = None
    """Folder that outlives the leases, for modules that tuners build; default: none is kept."""
    via: Host | None = None
    """Login node on which Slurm's commands are run: a name under `hosts:` or of your SSH configuration; default:
    here."""
    partition: Label | None = None
    """Slurm's partition; default: the cluster's."""
    account: Label | None = None
    """Slurm's account; default: yours."""
    extra: Annotated[tuple[Word, ...], BeforeValidator(listed)] = ()
    """Further options of sbatch, such as --constraint=mi355x."""
    context: Fixed | None = None
    """Context of your kubeconfig; default: the current one, in a pod its service account."""
    namespace: Label | None = None
    """Namespace of the pods; default: the context's."""
    resource: Fixed = "amd.com/gpu"
    """Name that the device plugin gives to a GPU."""
    pod: dict[str, Any] = Field(default_factory=dict)
    """Part of a pod that is merged into ours: labels, tolerations, volumes, nodeSelector."""

    @property
    def time_s(self) -> int:
        """Time limit of a lease in seconds."""
        return value_of(self.time)


def pool_words(node: LeaseOptions, each: str = "") -> str:
    """Return `1 to 8 leases by Slurm, partition gpu`; `each` stands behind the number of leases."""
    least, most = node.count
    leases = plural(most, "lease") if least == most else f"{least} to {most} leases"
    by = {"slurm": f"Slurm, partition {node.partition or 'by default'}", "kubernetes": "Kubernetes"}[node.lease or ""]
    return f"{leases}{each} by {by}"


DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,40}[a-z0-9])?\Z")


def conflicts_of_pool(node: Any, given: frozenset[str] | set[str]) -> Iterator[tuple[tuple[str, ...], str]]:
    """(path below the node, problem and way out) of lease options that do not fit. `given`: the node's own options."""
    if node.lease is None:
        for option in (*_BOTH, *_SLURM, *_KUBERNETES):
            if option in given:
                yield (option,), "is for a pool of leases: add lease: slurm or lease: kubernetes, or drop it"
        return
    kind, other = node.lease, "slurm" if node.lease == "kubernetes" else "kubernetes"
    for option in _KUBERNETES if kind == "slurm" else _SLURM:
        if option in given:
            yield (option,), f"is for lease: {other}, and this node's is {kind}: drop it"
    if node.transport != "local":
        way = "name the login node in via:" if kind == "slurm" else "drop transport: (or write transport: local)"
        yield ("transport",), f"a lease is reached by its scheduler and not by SSH: {way}"
    if isinstance(node.gpus, tuple):
        yield ("gpus",), "which GPUs a lease has is the scheduler's choice: give their number"
    if kind == "kubernetes":
        if node.gpus == "auto":
            yield ("gpus",), "a pod needs a number of GPUs (0: none)"
        if node.image is None:
            yield ("image",), "a pod needs an image: name one such as rocm/pytorch:latest"
        if node.engine != "process":
            yield ("engine",), f"a pod is a container already: drop engine: {node.engine}, the pod's image is `image:`"
        if not DNS_LABEL.match(node.name):
            yield (), "a pool of pods needs a name of small letters, digits and '-', at most 42: its pods are called so"
