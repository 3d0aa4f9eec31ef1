"""Model of an inventory and its JSON schema. A new option is a field of NodeOptions (or Defaults) and nothing else.

`load` adds file, line and place to a fault, and checks which options fit together; `values` has the kinds of value.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from orchestrator import engines
from orchestrator.errors import InputError
from orchestrator.families import get_family
from orchestrator.inventory.pools import LeaseOptions, LoginHost
from orchestrator.inventory.values import (
    NAME_RE,
    Absolute,
    Capability,
    CompilerVariable,
    ContainerUser,
    Device,
    Env,
    Fixed,
    Gfx,
    GpuArchs,
    Gpus,
    GroupRef,
    Host,
    Image,
    Jump,
    Labels,
    Mount,
    Network,
    Numa,
    Port,
    Private,
    SecurityOption,
    Size,
    User,
    Word,
    has_reference,
    listed,
    texts,
)
from orchestrator.tables.faults import did_you_mean, shown
from worker.families import DEFAULT_FAMILY
from worker.protocol.paths import AITER_ROOT_ENV
from worker.tuners.catalog import built_in, find_tuner, names

OWN_RENDER_NODE = "/dev/dri"
"""Device that stands for the render node of the slot's own GPU."""
DEVICE_GROUPS = "auto"
"""Group that stands for the groups that own the slot's devices on the node."""


class Strict(BaseModel):
    """A frozen model: unknown keys are errors, and no type is converted to another."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


class DockerSection(Strict):
    """Options of the containers. What is not given here is Docker's own default, but for network, which is none, and
    for the devices."""

    devices: Annotated[tuple[Device, ...] | None, BeforeValidator(listed)] = None
    """Devices of the node. Without a list a container gets the GPU of its slot: of AMD /dev/kfd, the GPU's render node
    and the groups that own them, of NVIDIA `--gpus device=N`. In a list, `/dev/dri` alone means the render node of the
    slot's own GPU; `/dev/dri:/dev/dri` all."""
    group_add: Annotated[tuple[GroupRef, ...], BeforeValidator(listed)] = ()
    """Further groups: `auto` (the numeric groups of the devices, read on the node), numbers, or names of the image."""
    cap_add: Annotated[tuple[Capability, ...], BeforeValidator(listed)] = ()
    """Capabilities on top of Docker's own, such as SYS_PTRACE. Never ALL, and never --privileged."""
    security_opt: Annotated[tuple[SecurityOption, ...], BeforeValidator(listed)] = ()
    """Security options, such as seccomp=unconfined."""
    shm_size: Size | None = None
    """Size of /dev/shm where ipc is private, such as 16G."""
    ipc: Literal["private", "host", "shareable", "none"] = "private"
    """IPC namespace: shared memory and semaphores that the container sees."""
    network: Network = "none"
    """none, host, bridge, or the name of a network on the node."""
    volumes: Annotated[tuple[Mount, ...], BeforeValidator(listed)] = ()
    """Further mounts, SOURCE:TARGET[:ro]; the node folder is mounted anyway."""
    env: Env = Field(default_factory=dict)
    """Environment of the containers, on top of the node's own `env`."""
    pull: Literal["missing", "always", "never"] = "missing"
    """Pull policy of the image."""
    docker_command: Annotated[tuple[Word, ...], BeforeValidator(listed), Field(min_length=1)] = ("docker",)
    """Command that runs docker on the node, such as [sudo, -n, docker]."""
    user: ContainerUser | None = None
    """USER or UID:GID within the container; default: the owner of the node folder."""
    memory: Size | None = None
    """Limit of a container's memory, such as 200g; what needs more is ended and counts as out of memory."""


def _family(value: str) -> str:
    try:
        return get_family(value).name
    except InputError as e:
        raise ValueError(str(e)) from e


def _engine(value: Any) -> Any:
    if value in engines.built_in():
        return value  # the usual case, without a look at what is installed
    if value not in (legal := engines.names()):
        raise ValueError(
            f"{shown(str(value))} is not legal{did_you_mean(str(value), legal)} (legal: {', '.join(legal)})"
        )
    try:
        engines.find_engine(value)
    except engines.EngineNotFoundError as e:
        raise ValueError(str(e)) from e
    return value


def _tuner(value: str) -> str:
    """Name of a tuner, as it is; its package is imported when it is used. Raise ValueError for an unknown one."""
    if value in built_in() and not find_tuner(value).own_command:
        return value  # the usual case, without reading the installed packages
    if value not in (legal := names()):
        raise ValueError(f"{shown(value)} is not legal{did_you_mean(value, legal)} (legal: {', '.join(legal)})")
    return value


class AiterSection(Strict):
    """The `aiter:` section of a node: what its AITER needs that cannot be found."""

    root: Fixed | None = None
    """AITER's tree or package on the node (in the image, with docker), where it is not found by itself."""
    compilers: dict[CompilerVariable, Fixed] = Field(default_factory=dict)
    """Folders of other compilers, by the variable that AITER asks for, such as GEMM_A4W4_BLOCKWISE_HIP_CLANG_PATH."""
    gpu_archs: GpuArchs | None = None
    """GPU_ARCHS of AITER's processes in place of the slot's own chip; of a list such as gfx942;gfx950 AITER takes the
    last."""
    cu_num: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """CU_NUM of AITER's processes in place of the slot's own."""

    def variables(self) -> dict[str, str]:
        """Variables of the workers' environment."""
        given = {AITER_ROOT_ENV: self.root, "GPU_ARCHS": self.gpu_archs, "CU_NUM": self.cu_num}
        return {**{name: str(value) for name, value in given.items() if value}, **self.compilers}


class MachineOptions(Strict):
    """Options of a machine and of what runs on it."""

    transport: Literal["local", "ssh"] = "local"
    """Transport of files and commands: `local`, where the node is this machine, or `ssh`."""
    engine: Annotated[str, BeforeValidator(_engine)] = "process"
    """Engine that starts the workers: as processes, or in containers, one a slot."""
    engine_options: dict[str, Any] = Field(default_factory=dict)
    """Options of an installed engine."""
    host: Host | None = None
    """Host name, address, or name in your SSH configuration; default: the node's name."""
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
    image: Image | None = None
    """Image of the worker containers."""
    gpus: Gpus = "auto"
    """auto: all that are found; a number: so many of the first, 0 means none and one slot with all cores;
    a list: these."""
    workdir: Private | None = None
    """Folder on the node for runs."""
    results: Absolute | None = None
    """Folder on the node where the rows and logs of a run stay, and the larger files of tuners, which find their
    part of it in GEMMFLEET_RESULTS."""
    python: Fixed | None = None
    """Interpreter on the node, or in the image with engine docker."""
    busy: Literal["wait", "skip", "share"] | None = None
    """Action while the node is occupied: wait until it is free (the default), skip it, or share it;
    --busy wins."""
    docker: DockerSection = DockerSection()
    """Options of containers, with engine docker."""
    aiter: AiterSection = AiterSection()
    """AITER on this node: its tree, environment and compilers."""
    env: Env = Field(default_factory=dict)
    """Environment of the workers."""
    labels: Labels = ()
    """Labels by which --limit picks nodes."""
    gfx: Gfx | None = None
    """Architecture of the GPUs where it is known beforehand, such as gfx950; else it is detected."""
    cu_num: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Compute units of a GPU where known beforehand; else detected."""
    numa: Numa = "auto"
    """auto: a slot's worker runs on the cores of its GPU's NUMA node where that is known; none: anywhere;
    a list: the NUMA node of each slot."""


class NodeOptions(LeaseOptions, MachineOptions):
    """Options of `defaults` and of a node. References `${env:NAME}` stay as they are written."""


class Defaults(NodeOptions):
    """The options that hold for all nodes, and those of the fleet as a whole."""

    family: Annotated[str, AfterValidator(_family)] = DEFAULT_FAMILY
    """The GEMM family that is tuned where none is named."""
    tuner: Annotated[str, AfterValidator(_tuner)] = "torch"
    """The tuner that is used where none is named."""


class Node(NodeOptions):
    """A node with the defaults merged in."""

    name: str
    source: str = ""
    origins: dict[str, int] = Field(default_factory=dict, repr=False)
    """The line of each text that holds a reference, by its path such as `docker.volumes.0`, and that of the node itself
    as `name`."""

    login: LoginHost | None = None
    """The host that `via:` names, where `hosts:` has it."""

    @property
    def is_here(self) -> bool:
        """Return whether the node is this machine: its files are ours, and it is reached without a connection."""
        return self.transport == "local" and self.lease is None

    def origin(self, path: str) -> str:
        """`file:line` of an option that holds a reference, or of the node (`name`)."""
        line = self.origins.get(path)
        return f"{self.source}:{line}" if line else self.source or "inventory"

    def options(self) -> dict[str, Any]:
        """The options as plain data."""
        return self.model_dump(exclude={"name", "source", "origins", "login"})


class InventoryFile(Strict):
    """The file as written."""

    defaults: Defaults = Defaults()
    """Options for all nodes, and of the fleet as a whole."""
    hosts: dict[str, LoginHost] = Field(default_factory=dict)
    """Login nodes of clusters by name, for `via:`."""
    nodes: dict[str, NodeOptions]
    """The nodes by name; what a node says wins over the defaults."""


class Inventory(Strict):
    """A checked inventory. `nodes` is in the file's order; `source` is the path as given."""

    source: str
    defaults: Defaults
    nodes: dict[str, Node]

    @property
    def family(self) -> str:
        """The family that is tuned where none is named."""
        return self.defaults.family

    @property
    def tuner(self) -> str:
        """The tuner that is used where none is named."""
        return self.defaults.tuner


Lines = Callable[[tuple[str | int, ...]], int | None]
"""Line of a place in the file."""


def merged(
    name: str,
    defaults: Defaults,
    options: NodeOptions,
    source: str = "",
    lines: Lines | None = None,
    hosts: Mapping[str, LoginHost] | None = None,
) -> Node:
    """A node's options over the defaults: what the node says wins, option by option within `docker`; `env` is
    merged name by name, `labels` add up. `hosts`: the login nodes that `via:` may name."""
    values: dict[str, Any] = {}
    docker: dict[str, Any] = {}
    own = lines(("nodes", name)) if lines else None
    origins: dict[str, int] = {"name": own} if own else {}
    for place, layer in ((("defaults",), defaults), (("nodes", name), options)):
        given = {f: getattr(layer, f) for f in layer.model_fields_set & NodeOptions.model_fields.keys()}
        section: dict[str, Any] = {f: getattr(layer.docker, f) for f in layer.docker.model_fields_set}
        for path, text in texts({**given, "docker": section}):
            line = lines((*place, *_loc(path))) if lines and has_reference(text) else None
            if line:
                origins[path] = line
        values |= given
        docker |= section
    values["aiter"] = {
        "root": options.aiter.root or defaults.aiter.root,
        "compilers": {**defaults.aiter.compilers, **options.aiter.compilers},
        "gpu_archs": options.aiter.gpu_archs or defaults.aiter.gpu_archs,
        "cu_num": options.aiter.cu_num or defaults.aiter.cu_num,
    }
    values["docker"] = {**docker, "env": {**defaults.docker.env, **options.docker.env}}
    values["env"] = {**defaults.env, **options.env}
    values["labels"] = tuple(dict.fromkeys((*defaults.labels, *options.labels)))
    login = (hosts or {}).get(values.get("via") or "")
    return Node.model_validate({"name": name, "source": source, "origins": origins, "login": login, **values})


def _loc(path: str) -> tuple[str | int, ...]:
    return tuple(int(p) if p.isdigit() else p for p in path.split("."))


TITLE = "Inventory of gemmfleet"


def json_schema() -> dict[str, Any]:
    """The schema as plain data (draft 2020-12)."""
    schema = InventoryFile.model_json_schema()
    _tidy(schema)
    nodes = schema["properties"]["nodes"]
    nodes["propertyNames"] = {"pattern": "^" + NAME_RE.pattern.replace("\\Z", "$")}
    nodes["minProperties"] = 1
    nodes["additionalProperties"] = _or_nothing(nodes["additionalProperties"])
    schema["properties"]["defaults"] = _or_nothing(schema["properties"]["defaults"])
    tuner = schema["$defs"]["Defaults"]["properties"]["tuner"]
    del tuner["type"]  # an installed package may have further ones
    tuner["anyOf"] = [{"enum": [n for n in built_in() if not find_tuner(n).own_command]}, {"type": "string"}]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": TITLE}


def dumps() -> str:
    """The text of inventories/inventory.schema.json."""
    return json.dumps(json_schema(), indent=1) + "\n"


def _or_nothing(schema: dict[str, Any]) -> dict[str, Any]:
    """`name:` without a value is a node (or defaults) without options."""
    given = {k: schema.pop(k) for k in ("description",) if k in schema}
    return {"anyOf": [schema, {"type": "null"}], **given}


def _tidy(value: Any) -> None:
    """Drop the titles that only repeat the names, and fold the lines of descriptions."""
    if isinstance(value, list):
        for item in value:
            _tidy(item)
    if not isinstance(value, dict):
        return
    if isinstance(value.get("title"), str):
        del value["title"]
    if isinstance(value.get("description"), str):
        value["description"] = " ".join(value["description"].split())
    for key, item in value.items():
        if key != "default":
            _tidy(item)
