"""Values of an inventory: references to the environment, and every kind of value with its rule.

A reference `${env:NAME}` stays as it is written in the model and in every file that this program writes. It is
resolved at the moment of use, in memory, and what comes out is handed on and never kept: values for workers reach a
node on the standard input of its launcher.

Validators raise ValueError with a text on what to write, and never repeat the value: it may be private. Kinds marked
*private* may hold references; their rule is checked on the text around them here and on the whole when they are
resolved.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, WithJsonSchema

from orchestrator.errors import InventoryError

REFERENCE_RE = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)\}")
_BROKEN_RE = re.compile(r"\$\{\s*env\s*:|\$\{env\b")


def names(text: str) -> tuple[str, ...]:
    """The variables that a text refers to, in order, each once."""
    return tuple(dict.fromkeys(REFERENCE_RE.findall(text)))


def has_reference(text: str) -> bool:
    """Return whether a text refers to the environment."""
    return REFERENCE_RE.search(text) is not None


def masked(text: str, filler: str = "x") -> str:
    """The text with `filler` for each reference: its form can be checked before its values are known.

    Raises ValueError where something looks like a reference and is none.
    """
    out = REFERENCE_RE.sub(lambda _: filler, text)
    if _BROKEN_RE.search(out):
        raise ValueError("a reference is written ${env:NAME}, NAME of letters, digits and '_', not a digit first")
    return out


def texts(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """(path, text) of every text within plain data; paths such as `docker.volumes.0`."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from texts(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from texts(item, f"{path}.{i}")


def masker(value: Any, environ: Mapping[str, str] | None = None) -> Callable[[str], str]:
    """Function that puts the references of this data back in place of their values, where these are whole words. For
    messages that are kept: those of a host or a registry may repeat its own name. Values of fewer than three
    characters stay.
    """
    env = os.environ if environ is None else environ
    used = {env[name]: name for _, text in texts(value) for name in names(text) if len(env.get(name, "")) >= 3}
    for private, name in list(used.items()):  # Docker may name an image's registry alone
        registry = private.partition("/")[0]
        if registry != private and ("." in registry or ":" in registry):
            used.setdefault(registry, name)
    if not used:
        return lambda text: text
    longest_first = "|".join(re.escape(v) for v in sorted(used, key=len, reverse=True))
    pattern = re.compile(f"(?<![A-Za-z0-9])(?:{longest_first})(?![A-Za-z0-9])")
    return lambda text: pattern.sub(lambda m: f"${{env:{used[m[0]]}}}", text)


def missing(value: Any, environ: Mapping[str, str] | None = None) -> list[tuple[str, str]]:
    """(path, NAME) of every reference within plain data whose variable is not set."""
    env = os.environ if environ is None else environ
    return [(path, name) for path, text in texts(value) for name in names(text) if name not in env]


def resolve(
    value: Any,
    node: str,
    origin: Callable[[str], str],
    environ: Mapping[str, str] | None = None,
) -> Any:
    """Plain data with every reference replaced by its variable's value (our own environment's by default).

    `origin` gives `file:line` of a path within the data. Raises InventoryError with one fault a missing
    variable, naming file, line, node and NAME; no fault holds a value.
    """
    env = os.environ if environ is None else environ
    faults = [
        f"{origin(path)}: node {node}: {path} refers to ${{env:{name}}}, and {name} is not set here:"
        f" export {name}=... and try again"
        for path, name in missing(value, env)
    ]
    if faults:
        raise InventoryError(list(dict.fromkeys(faults)))
    return _resolved(value, env)


def _resolved(value: Any, env: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return REFERENCE_RE.sub(lambda m: env[m[1]], value)
    if isinstance(value, Mapping):
        return {key: _resolved(item, env) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_resolved(item, env) for item in value)
    return value


NAME_RE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")
NAME_RULE = "must be letters, digits, '.', '_' and '-', at most 63, the first a letter or digit"
MAX_GPU = 9999
"""The largest GPU number; a slot's name has at most four digits."""

_ENV_NAME_RE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_SECRET_ENV_RE = re.compile(r"(?:^|_)(?:PASSWORD|PASSWD|PASSPHRASE|TOKEN|SECRET|API_?KEY|CREDENTIALS?)(?:$|_)", re.I)
_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?|[0-9A-Fa-f]*:[0-9A-Fa-f:.]+(?:%[A-Za-z0-9._-]+)?)"
_USER = r"[A-Za-z0-9_][A-Za-z0-9_.@\\-]*\$?"


def _gpus(value: Any) -> Any:
    if value == "auto" or (type(value) is int and 0 <= value <= MAX_GPU + 1):
        return value
    if isinstance(value, (list, tuple)) and value and all(type(v) is int and 0 <= v <= MAX_GPU for v in value):
        if len(set(value)) != len(value):
            raise ValueError("names a GPU twice")
        return tuple(value)
    raise ValueError("must be auto, a number of GPUs (0: use none), or a list of GPU numbers such as [0, 1]")


def _numa(value: Any) -> Any:
    if value in ("auto", "none"):
        return value
    if isinstance(value, (list, tuple)) and value and all(type(v) is int and 0 <= v < 1024 for v in value):
        return tuple(value)
    raise ValueError("must be auto, none, or a list with the NUMA node of each slot such as [0, 0, 1, 1]")


def _plain(value: str) -> str:
    if not value or not value.isprintable():
        raise ValueError("must be text without control characters, and not empty")
    return value


def _private(value: str) -> str:
    masked(value)
    return _plain(value)


def _absolute(value: str) -> str:
    _private(value)
    if not value.startswith(("/", "${env:")) or ":" in masked(value):
        raise ValueError("must be a path on the node that begins with '/', without ':'")
    return value


def _fixed(value: str) -> str:
    if has_reference(value):
        raise ValueError("no reference can stand here: it is written into the node's scripts as it is")
    return _plain(value)


def _matching(pattern: str, rule: str) -> Callable[[str], str]:
    """A rule for a private value: the text with its references masked must match."""
    compiled = re.compile(f"(?:{pattern})\\Z")

    def check(value: str) -> str:
        if not compiled.match(masked(value)):
            raise ValueError(rule)
        return value

    return check


def _name(value: str) -> str:
    if not NAME_RE.match(value):
        raise ValueError(NAME_RULE)
    return value


def listed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _once(value: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(value))


def _env_name(value: str) -> str:
    if not _ENV_NAME_RE.match(value):
        raise ValueError("a variable's name must be letters, digits and '_', and not begin with a digit")
    return value


def _env_value(value: str) -> str:
    if "\0" in value or "\n" in value or "\r" in value:
        raise ValueError("must be one line of text")
    masked(value)
    return value


def _no_secrets(value: dict[str, str]) -> dict[str, str]:
    for name, text in value.items():
        secret = _SECRET_ENV_RE.search(name) and len(text) >= 8 and not text.isdigit()
        if secret and not has_reference(text):
            raise ValueError(f"{name} looks like a secret, which has no place in a file: write ${{env:{name}}} here")
    return value


def _mount(value: str) -> str:
    parts = masked(value, "/x" if value.startswith("${env:") else "x").split(":")
    source, target = (parts[0], parts[1]) if len(parts) in (2, 3) else ("", "")
    named = NAME_RE.match(source) is not None
    if not (named or source.startswith("/")) or not target.startswith("/"):
        raise ValueError("must be SOURCE:TARGET or SOURCE:TARGET:ro, SOURCE a path on the node, TARGET one in it")
    if any(p in ("..", ".") for part in (source, target) for p in part.split("/")):
        raise ValueError("must be paths without '.' and '..'")
    if len(parts) == 3 and not re.match(r"[a-zA-Z]+(?:,[a-zA-Z]+)*\Z", parts[2]):
        raise ValueError("what follows the second ':' must be options such as ro")
    return value


def _device(value: str) -> str:
    if not re.match(r"/dev/[A-Za-z0-9._/-]+(?::/[A-Za-z0-9._/-]+(?::[rwm]{1,3})?)?\Z", value) or "/../" in value + "/":
        raise ValueError("must be a device such as /dev/kfd, or /dev/a:/dev/b:rw")
    return value


def _cap(value: str) -> str:
    if value.upper() in ("ALL", "CAP_ALL"):
        raise ValueError("ALL is as good as --privileged: name the capabilities that are needed")
    if not re.match(r"[A-Z][A-Z_]*\Z", value):
        raise ValueError("must be a capability such as SYS_PTRACE")
    return value


def _group(value: Any) -> Any:
    if type(value) is int and 0 <= value < 2**32:
        return str(value)
    if isinstance(value, str) and NAME_RE.match(value):
        return value
    raise ValueError("must be auto, a group's number on the node, or its name in the image")


Text = Annotated[str, StringConstraints(max_length=4096)]

Gpus = Annotated[Literal["auto"] | int | tuple[int, ...], BeforeValidator(_gpus)]
Numa = Annotated[Literal["auto", "none"] | tuple[int, ...], BeforeValidator(_numa)]
Absolute = Annotated[Text, AfterValidator(_absolute)]
Fixed = Annotated[Text, AfterValidator(_fixed)]
Private = Annotated[Text, AfterValidator(_private)]
Host = Annotated[
    Text,
    AfterValidator(_matching(_HOST, "must be a host name, an address or a name of your SSH configuration, alone")),
]
User = Annotated[Text, AfterValidator(_matching(_USER, "must be a login name"))]
Jump = Annotated[
    Text,
    AfterValidator(
        _matching(
            rf"none|(?:{_USER}@)?(?:{_HOST}|\[[0-9A-Fa-f:.%]+\])(?::[0-9]{{1,5}})?"
            rf"(?:,(?:{_USER}@)?(?:{_HOST}|\[[0-9A-Fa-f:.%]+\])(?::[0-9]{{1,5}})?)*",
            "must be [USER@]HOST[:PORT], several with ',' between, or none",
        )
    ),
]
Image = Annotated[
    Text,
    AfterValidator(_matching(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*", "must be an image such as rocm/atom:latest")),
]
Mount = Annotated[Text, AfterValidator(_mount)]
Device = Annotated[Text, AfterValidator(_device)]
Capability = Annotated[Text, AfterValidator(_cap)]
GroupRef = Annotated[
    str, BeforeValidator(_group), WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string"}]})
]
SecurityOption = Annotated[
    Text, AfterValidator(_matching(r"[a-z][A-Za-z0-9._:=/-]*", "must be an option such as seccomp=unconfined"))
]
Network = Annotated[
    Text,
    AfterValidator(_matching(r"[A-Za-z0-9][A-Za-z0-9._-]*", "must be none, host, bridge or a network's name")),
]
Size = Annotated[
    Text,
    AfterValidator(_matching(r"[1-9][0-9]*[bkmgBKMG]?", "must be a size in bytes, or with k, m or g, such as 16G")),
]
ContainerUser = Annotated[
    Text,
    AfterValidator(
        _matching(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(?::[A-Za-z0-9_][A-Za-z0-9_.-]*)?", "must be USER or UID:GID")
    ),
]
Gfx = Annotated[Text, AfterValidator(_matching(r"[A-Za-z0-9][A-Za-z0-9_.:+-]{0,63}", "must be a name such as gfx950"))]
GpuArchs = Annotated[
    Text, AfterValidator(_matching(r"gfx[0-9a-z]+(?:;gfx[0-9a-z]+)*", "must be chips such as gfx950 or gfx942;gfx950"))
]
Word = Annotated[Text, AfterValidator(_fixed)]
Label = Annotated[
    Text, AfterValidator(_matching(r"[A-Za-z0-9][A-Za-z0-9._,-]{0,62}", "must be a plain name without references"))
]
Name = Annotated[str, AfterValidator(_name)]
EnvName = Annotated[str, AfterValidator(_env_name)]
CompilerVariable = Annotated[
    str,
    AfterValidator(_env_name),
    AfterValidator(
        _matching(r"[A-Z0-9_]+_HIP_CLANG_PATH", "must be a variable such as GEMM_A4W4_BLOCKWISE_HIP_CLANG_PATH")
    ),
]
EnvValue = Annotated[str, StringConstraints(max_length=32768), AfterValidator(_env_value)]
Env = Annotated[dict[EnvName, EnvValue], AfterValidator(_no_secrets)]
Labels = Annotated[tuple[Name, ...], BeforeValidator(listed), AfterValidator(_once)]
Port = Annotated[int, Field(ge=1, le=65535)]
