"""What an inventory may hold. A new option is a field of NodeOptions (or Defaults) and nothing else.

Validators raise ValueError with a text that says what to write; `load` adds file, line and place.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from orchestrator.errors import InputError
from orchestrator.families import DEFAULT_FAMILY, get_family

NAME_RE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")
NAME_RULE = "must be letters, digits, '.', '_' and '-', at most 63, the first a letter or digit"
_ENV_NAME_RE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
MAX_GPU = 9999
"""The largest GPU number; a slot's name has at most four digits."""


class Strict(BaseModel):
    """Unknown keys are errors, nothing is converted from one type to another, nothing changes later."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def _gpus(value: Any) -> Any:
    if value == "auto" or (type(value) is int and 0 <= value <= MAX_GPU + 1):
        return value
    if isinstance(value, (list, tuple)) and value and all(type(v) is int and 0 <= v <= MAX_GPU for v in value):
        if len(set(value)) != len(value):
            raise ValueError("names a GPU twice")
        return tuple(value)
    raise ValueError("must be auto, a number of GPUs (0: use none), or a list of GPU numbers such as [0, 1]")


def _plain(value: str) -> str:
    if not value or not value.isprintable():
        raise ValueError("must be text without control characters, and not empty")
    return value


def _family(value: str) -> str:
    try:
        return get_family(value).name
    except InputError as e:
        raise ValueError(str(e)) from e


def _name(value: str) -> str:
    if not NAME_RE.match(value):
        raise ValueError(NAME_RULE)
    return value


def _listed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _once(value: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(value))


def _env_name(value: str) -> str:
    if not _ENV_NAME_RE.match(value):
        raise ValueError("a variable's name must be letters, digits and '_', and not begin with a digit")
    return value


def _env_value(value: str) -> str:
    if "\0" in value or "\n" in value:
        raise ValueError("must be one line of text")
    return value


Gpus = Annotated[Literal["auto"] | int | tuple[int, ...], BeforeValidator(_gpus)]
Plain = Annotated[str, StringConstraints(max_length=4096), AfterValidator(_plain)]
Name = Annotated[str, AfterValidator(_name)]
EnvName = Annotated[str, AfterValidator(_env_name)]
EnvValue = Annotated[str, StringConstraints(max_length=32768), AfterValidator(_env_value)]
Labels = Annotated[tuple[Name, ...], BeforeValidator(_listed), AfterValidator(_once)]


class NodeOptions(Strict):
    """What `defaults` and a node may say. References `${env:NAME}` stay as they are written."""

    transport: Literal["local"] = "local"
    engine: Literal["process"] = "process"
    gpus: Gpus = "auto"
    """auto: all that are found; a number: so many of the first, 0 means none and one slot with all cores;
    a list: these."""
    workdir: Plain | None = None
    """Folder on the node for runs."""
    python: Plain | None = None
    """Interpreter on the node."""
    env: dict[EnvName, EnvValue] = Field(default_factory=dict)
    labels: Labels = ()


class Defaults(NodeOptions):
    """The options that hold for all nodes, and those of the fleet as a whole."""

    family: Annotated[str, AfterValidator(_family)] = DEFAULT_FAMILY
    tuner: Literal["torch", "replay"] = "torch"


class Node(NodeOptions):
    """A node with the defaults merged in."""

    name: str


class InventoryFile(Strict):
    """The file as written."""

    defaults: Defaults = Defaults()
    nodes: dict[str, NodeOptions]


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


def merged(name: str, defaults: Defaults, options: NodeOptions) -> Node:
    """A node's options over the defaults: what the node says wins, `env` name by name; `labels` add up."""
    values: dict[str, Any] = {}
    for source in (defaults, options):
        values |= {f: getattr(source, f) for f in source.model_fields_set & NodeOptions.model_fields.keys()}
    values["env"] = {**defaults.env, **options.env}
    values["labels"] = tuple(dict.fromkeys((*defaults.labels, *options.labels)))
    return Node.model_validate({"name": name, **values})
