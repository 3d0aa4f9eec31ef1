"""All options of an inventory: name, type with its rule, default, and the text for the docs.

Each field is one option. The reader's checks, the legal keys in its messages, the JSON schema
(inventories/inventory.schema.json), the tables of docs/reference/inventory.md (tests/support/inventory_page.py) and,
for an option with a `Variable`, the worker's setting are all made from it. So a new option is a field here, and the
code that uses it. `load` reads files; `option_types` has the rules of the values.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from orchestrator import engines
from orchestrator.inventory.option_types import (
    NAME_RE,
    Absolute,
    Capabilities,
    CompilerVariable,
    ContainerUser,
    Devices,
    Env,
    Gfx,
    GpuArchs,
    Gpus,
    Groups,
    Host,
    Image,
    Jump,
    Label,
    Labels,
    LeaseCount,
    Mounts,
    Network,
    Numa,
    PlainText,
    Port,
    ReferenceText,
    SecurityOptions,
    Size,
    Time,
    Units,
    User,
    Words,
    one_of,
    seconds_of,
)
from worker.families import DEFAULT_FAMILY, FAMILIES
from worker.protocol.paths import AITER_ROOT_ENV, SGLANG_ROOT_ENV, VLLM_ROOT_ENV
from worker.text import plural
from worker.tuners.catalog import built_in, find_tuner, names

OWN_RENDER_NODE = "/dev/dri"
"""Device that stands for the render node of the slot's own GPU."""
DEVICE_GROUPS = "auto"
"""Group that stands for the groups that own the slot's devices on the node."""


@dataclass(frozen=True, slots=True)
class Variable:
    """Annotates an option's type with the environment variable of the workers that gets its value."""

    name: str


@dataclass(frozen=True, slots=True)
class For:
    """Annotates an option's type with another option of the node, and the values of it that this one needs."""

    option: str
    values: tuple[str, ...]


def option(default: Any, value: str, meaning: str) -> Any:
    """A field of the table. `value`: the docs' words for what it takes, with the default in brackets."""
    return Field(default, title=value, description=meaning)


class Strict(BaseModel):
    """A frozen model: unknown keys are errors, and types are never converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def variables(self) -> dict[str, str]:
        """The workers' variables that options of this section set themselves, references as they are written."""
        variables = {}
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            for annotation in field.metadata:
                if isinstance(annotation, Variable) and value is not None:
                    variables[annotation.name] = str(value)
        return variables


_SSH = For("transport", ("ssh",))
_POOL = For("lease", ("slurm", "kubernetes"))
_SLURM = For("lease", ("slurm",))
_KUBERNETES = For("lease", ("kubernetes",))


class LoginHost(Strict):
    """The way to a host by SSH. Under `hosts:` one that commands are run on and nothing is tuned on, such as a
    cluster's login node."""

    host: Annotated[Host | None, _SSH] = option(
        None, "text* (the node's name)", "host name, address, or a name of your SSH configuration"
    )
    port: Annotated[Port | None, _SSH] = option(None, "number (SSH configuration, else 22)", "port of its sshd")
    user: Annotated[User | None, _SSH] = option(None, "text* (SSH configuration, else yours)", "login name")
    identity: Annotated[ReferenceText | None, _SSH] = option(
        None, "path here* (SSH configuration and agent)", "private key file"
    )
    proxy_jump: Annotated[Jump | None, _SSH] = option(
        None,
        "text* (SSH configuration)",
        "jump hosts: `[USER@]HOST[:PORT]`, separated by `,`; `none`: connect directly",
    )
    ssh_config: Annotated[ReferenceText | None, _SSH] = option(
        None, "text* (yours and the system's)", "SSH configuration file, as with `ssh -F`"
    )


class DockerSection(Strict):
    """Options of the containers. An option that is not given has Docker's default, except that there is no network, and
    that the slot's GPU is passed in."""

    devices: Devices | None = option(
        None,
        "list (the GPU of the slot)",
        "devices; `/dev/dri` becomes the render node of the slot's GPU, `/dev/dri:/dev/dri` passes all",
    )
    group_add: Groups = option(
        (), "list (none)", "further groups: `auto` (owners of the devices), numbers, or names in the image"
    )
    cap_add: Capabilities = option((), "list (none)", "capabilities such as `SYS_PTRACE`")
    security_opt: SecurityOptions = option((), "list (none)", "such as `seccomp=unconfined`")
    shm_size: Size | None = option(None, "size (64M)", "size of `/dev/shm`, such as `16G`")
    ipc: Literal["private", "host", "shareable", "none"] = option(
        "private", "`private`, `host`, `shareable`, `none` (`private`)", "IPC namespace"
    )
    network: Network = option("none", "text (`none`)", "`none`, `host`, `bridge`, or a network of the node")
    volumes: Mounts = option((), "list of `SOURCE:TARGET[:ro]`* (none)", "further mounts")
    env: Env = option({}, "mapping* (empty)", "environment, on top of `env`")
    pull: Literal["missing", "always", "never"] = option(
        "missing",
        "`missing`, `always`, `never` (`missing`)",
        "when the image is pulled; `always`: once at the start of a run, with the controller's Docker credentials",
    )
    docker_command: Annotated[Words, Field(min_length=1)] = option(
        ("docker",), "list (`[docker]`)", "how to call Docker: `[sudo, -n, docker]`"
    )
    user: ContainerUser | None = option(None, "`USER` or `UID:GID` (owner of the node folder)", "user in the container")
    memory: Size | None = option(None, "size (none)", "memory limit, such as `200g`")


class AiterSection(Strict):
    """The `aiter:` section of a node: what its AITER needs that cannot be found."""

    root: Annotated[PlainText | None, Variable(AITER_ROOT_ENV)] = option(
        None, "path (found by itself)", "AITER's tree or package on the node; with `docker`: in the image"
    )
    compilers: dict[CompilerVariable, PlainText] = option(
        {}, "mapping (empty)", "folders by variable: `GEMM_A4W4_BLOCKWISE_HIP_CLANG_PATH`, `FLATMM_HIP_CLANG_PATH`"
    )
    gpu_archs: Annotated[GpuArchs | None, Variable("GPU_ARCHS")] = option(
        None, "text (the slot's own)", "GPU_ARCHS of AITER's processes; of a list AITER takes the last"
    )
    cu_num: Annotated[Units | None, Variable("CU_NUM")] = option(
        None, "number (the slot's own)", "CU_NUM of AITER's processes"
    )


class VllmSection(Strict):
    """The `vllm:` section of a node."""

    root: Annotated[PlainText | None, Variable(VLLM_ROOT_ENV)] = option(
        None, "path (found by itself)", "vLLM's package, checkout or wheel on the node; with `docker`: in the image"
    )


class SglangSection(Strict):
    """The `sglang:` section of a node."""

    root: Annotated[PlainText | None, Variable(SGLANG_ROOT_ENV)] = option(
        None, "path (found by itself)", "SGLang's package, checkout or wheel on the node; with `docker`: in the image"
    )


class NodeOptions(LoginHost):
    """Options of `defaults` and of a node. References `${env:NAME}` stay as they are written."""

    transport: Literal["local", "ssh"] = option(
        "local", "`local`, `ssh` (`local`)", "how files and commands reach the node"
    )
    engine: Annotated[
        str, one_of(engines.built_in, engines.names), AfterValidator(lambda name: engines.find_engine(name).name)
    ] = option(
        "process",
        "`process`, `docker`, `pyxis`, `apptainer` or an installed one (`process`)",
        "workers are processes, or in containers, one for each slot",
    )
    engine_options: dict[str, Any] = option({}, "mapping (empty)", "options of an installed engine")
    image: Image | None = option(None, "text* (required with a container engine)", "image of the workers")
    gpus: Gpus = option(
        "auto",
        "`auto`, number, list (`auto`)",
        "`auto`: one slot for each GPU found, else one slot with all cores; a number N: the first N GPUs, `0` for one"
        " slot without a GPU; `[0, 2]`: these",
    )
    workdir: ReferenceText | None = option(
        None, "path on the node* (`~/.gemmfleet`; local: in the run's folder)", "folder for the files of runs"
    )
    results: Absolute | None = option(
        None,
        "absolute path on the node* (none)",
        "folder that outlives runs: `RESULTS/<run>/<node>` (mode 0700) is mounted into containers, is"
        " `GEMMFLEET_RESULTS` for tuners, and gets copies of `events/` and `logs/` when the run ends",
    )
    python: PlainText | None = option(
        None, "text (found on the node; local: this program's; `docker`: the image's)", "interpreter of the workers"
    )
    busy: Literal["wait", "skip", "share"] | None = option(
        None,
        "`wait`, `skip`, `share` (`wait`)",
        "policy where the node is [occupied](../explanation/scheduling.md#occupied-nodes); `--busy` wins",
    )
    docker: DockerSection = option(DockerSection(), "mapping (below)", "how containers are started")
    aiter: AiterSection = option(
        AiterSection(),
        "mapping (below)",
        "what AITER needs that cannot be found ([precedence](../explanation/aiter.md#environment))",
    )
    vllm: VllmSection = option(VllmSection(), "mapping (below)", "the vLLM of the tuner `vllm`")
    sglang: SglangSection = option(SglangSection(), "mapping (below)", "the SGLang of the tuner `sglang`")
    env: Env = option({}, "mapping of text* (empty)", "environment of the workers")
    labels: Labels = option((), "list (empty)", "names for `--limit`, which also accepts node names")
    gfx: Gfx | None = option(
        None, "text (detected)", "architecture, such as `gfx950`, where known beforehand; needs `cu_num`"
    )
    cu_num: Units | None = option(None, "number (detected)", "compute units of a GPU; needs `gfx`")
    numa: Numa = option(
        "auto",
        "`auto`, `none`, list (`auto`)",
        "`auto`: pin a worker to the cores of its GPU's NUMA node where known; `none`: no pinning; list: NUMA node of"
        " each slot",
    )
    lease: Literal["slurm", "kubernetes"] | None = option(
        None,
        "`slurm`, `kubernetes` (none)",
        "the node is a pool of leases that a scheduler grants: [Slurm](../start/slurm.md),"
        " [Kubernetes](../how-to/kubernetes.md)",
    )
    count: Annotated[LeaseCount, _POOL] = option(
        (1, 1), "number or range (1)", "leases to start with and at most, such as `1-8`"
    )
    time: Annotated[Time, _POOL] = option("4h", "text (`4h`)", "time limit of a lease: `4h`, `90m`, `1d12h`")
    cache: Annotated[PlainText | None, _POOL] = option(
        None, "text (none)", "folder that outlives leases, for modules that tuners build"
    )
    via: Annotated[Host | None, _SLURM] = option(
        None,
        "text (here)",
        "Slurm: login node for its commands, by its name under `hosts:` or in your SSH configuration",
    )
    partition: Annotated[Label | None, _SLURM] = option(None, "text (the cluster's)", "Slurm: partition")
    account: Annotated[Label | None, _SLURM] = option(None, "text (yours)", "Slurm: account")
    extra: Annotated[Words, _SLURM] = option((), "list (empty)", "Slurm: further options of sbatch")
    context: Annotated[PlainText | None, _KUBERNETES] = option(
        None, "text (the current one)", "Kubernetes: context of your kubeconfig"
    )
    namespace: Annotated[Label | None, _KUBERNETES] = option(
        None, "text (the context's)", "Kubernetes: namespace of the pods"
    )
    resource: Annotated[PlainText, _KUBERNETES] = option(
        "amd.com/gpu", "text (`amd.com/gpu`)", "Kubernetes: the device plugin's name of a GPU"
    )
    pod: Annotated[dict[str, Any], _KUBERNETES] = option(
        {}, "mapping (empty)", "Kubernetes: part of a pod, merged into ours"
    )

    @property
    def time_s(self) -> int:
        """Time limit of a lease in seconds."""
        return seconds_of(self.time)


class Defaults(NodeOptions):
    """Options for all nodes, and options of the fleet as a whole."""

    family: Annotated[str, one_of(lambda: FAMILIES, lambda: FAMILIES)] = option(
        DEFAULT_FAMILY, "a [family](families.md) (`a16w16`)", "family where `--family` is not given"
    )
    tuner: Annotated[str, one_of(lambda: _own_tuners(), names)] = option(
        "torch", "a [tuner](tuners.md) (`torch`)", "tuner where `--tuner` is not given"
    )


def _own_tuners() -> list[str]:
    return [name for name in built_in() if not find_tuner(name).own_command]


class Node(NodeOptions):
    """A node with the defaults merged in. `origins`: the line of each text that holds a reference, by its path (such as
    `docker.volumes.0`), and the node's own line as `name`. `login`: the host that `via:` names, if `hosts:` has it."""

    name: str
    source: str = ""
    origins: dict[str, int] = Field(default_factory=dict, repr=False)
    login: LoginHost | None = None

    @property
    def is_here(self) -> bool:
        """Return whether the node is this machine: its files are ours, and it is reached without a connection."""
        return self.transport == "local" and self.lease is None

    def origin(self, path: str) -> str:
        """`file:line` of an option that holds a reference, or of the node (`name`)."""
        line = self.origins.get(path)
        return f"{self.source}:{line}" if line else self.source or "inventory"

    def options(self) -> dict[str, Any]:
        """The options as plain data, those of the login node under `login`."""
        return self.model_dump(exclude={"name", "source", "origins"})

    def pool_words(self, each: str = "") -> str:
        """`1 to 8 leases by Slurm, partition gpu` of a pool; `each` stands behind the number of leases."""
        least, most = self.count
        leases = plural(most, "lease") if least == most else f"{least} to {most} leases"
        slurm = f"Slurm, partition {self.partition or 'by default'}"
        return f"{leases}{each} by {slurm if self.lease == 'slurm' else 'Kubernetes'}"


class InventoryFile(Strict):
    """The file as written."""

    defaults: Defaults = Field(Defaults(), description="Options for all nodes, and of the fleet as a whole.")
    hosts: dict[str, LoginHost] = Field({}, description="Login nodes of clusters by name, for `via:`.")
    nodes: dict[str, NodeOptions] = Field(description="The nodes by name; what a node says wins over the defaults.")


class Inventory(Strict):
    """A checked inventory. `nodes` is in the file's order; `source` is the path as given."""

    source: str
    defaults: Defaults
    nodes: dict[str, Node]

    def without_pools(self) -> Inventory:
        """The inventory with its machines alone."""
        return self.model_copy(update={"nodes": {k: node for k, node in self.nodes.items() if node.lease is None}})


def dumps() -> str:
    """The text of inventories/inventory.schema.json (draft 2020-12)."""
    schema = _tidy(InventoryFile.model_json_schema())
    nothing = {"type": "null"}  # `name:` without a value is a node, or defaults, without options
    nodes = schema["properties"]["nodes"]
    nodes["propertyNames"] = {"pattern": "^" + NAME_RE.pattern.replace("\\Z", "$")}
    nodes["minProperties"] = 1
    nodes["additionalProperties"] = {"anyOf": [nodes["additionalProperties"], nothing]}
    defaults = schema["properties"]["defaults"]
    description = defaults.pop("description")
    schema["properties"]["defaults"] = {"anyOf": [defaults, nothing], "description": description}
    tuner = schema["$defs"]["Defaults"]["properties"]["tuner"]
    del tuner["type"]  # an installed package may have further ones
    tuner["anyOf"] = [{"enum": _own_tuners()}, {"type": "string"}]
    whole = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "Inventory of gemmfleet"}
    return json.dumps(whole, indent=1) + "\n"


def _tidy(value: Any) -> Any:
    """A schema without titles, which repeat the names or are for the docs, and without links in descriptions."""
    if isinstance(value, list):
        return [_tidy(item) for item in value]
    if not isinstance(value, dict):
        return value
    tidied = {}
    for key, item in value.items():
        if key == "title" and isinstance(item, str):
            continue
        if key == "description" and isinstance(item, str):
            item = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(item.split()))
        tidied[key] = item if key == "default" else _tidy(item)
    return tidied
