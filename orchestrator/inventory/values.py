"""Values of an inventory: references to the environment, and every kind of value with its rule.

A reference `${env:NAME}` stays as written in the model and in every file that this program writes. It is resolved in
memory when it is used, and its value is passed on but never stored: workers get values on the standard input of the
node's launcher.

Validators raise ValueError that says what to write. They do not repeat a text, because it may be private; only names
of a fixed list and numbers are shown. Here the rules are checked on the text around references; after resolving, on the
whole text.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, ValidationInfo, WithJsonSchema

from orchestrator.errors import InventoryError
from orchestrator.files.faults import shown
from worker.text import did_you_mean

REFERENCE_RE = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)\}")
_SHELL_RE = re.compile(r"\$\{?([A-Za-z_]\w{0,99})")
_BROKEN_RE = re.compile(r"\$\{\s*env\s*:|\$\{env\b")


def names(text: str) -> tuple[str, ...]:
    """The variables that a text refers to, in order, each once."""
    return tuple(dict.fromkeys(REFERENCE_RE.findall(text)))


def has_reference(text: str) -> bool:
    """Return whether a text refers to the environment."""
    return REFERENCE_RE.search(text) is not None


def with_filler(text: str, filler: str = "x") -> str:
    """The text with each reference replaced by `filler`, so that its form can be checked before the values are known.

    Raises ValueError if something looks like a reference but is malformed.
    """
    out = REFERENCE_RE.sub(lambda _: filler, text)
    if _BROKEN_RE.search(out):
        raise ValueError("a reference is written ${env:NAME}, NAME of letters, digits and '_', not a digit first")
    return out


def texts(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """(path, text) of every text within plain data; paths such as `docker.volumes.0`."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, (Mapping, list, tuple)):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from texts(item, f"{path}.{key}" if path else str(key))


def value_hider(value: Any) -> Callable[[str], str]:
    """Return a function that replaces the values of this data's references in a text by the references. It is for
    messages that we keep: an error of a host or a registry may contain its own name. Only whole words are replaced, and
    no values shorter than three characters.
    """
    env = os.environ
    used = {env[name]: name for _, text in texts(value) for name in names(text) if len(env.get(name, "")) >= 3}
    for private, name in list(used.items()):  # Docker may name an image's registry alone
        registry = private.partition("/")[0]
        if registry != private and ("." in registry or ":" in registry):
            used.setdefault(registry, name)
    longest_first = "|".join(re.escape(v) for v in sorted(used, key=len, reverse=True)) or r"(?!)"
    pattern = re.compile(f"(?<![A-Za-z0-9])(?:{longest_first})(?![A-Za-z0-9])")
    return lambda text: pattern.sub(lambda m: f"${{env:{used[m[0]]}}}", text)


def missing(value: Any, env: Mapping[str, str] = os.environ) -> list[tuple[str, str]]:
    """(path, NAME) of every reference in plain data whose variable is not set."""
    return [(path, name) for path, text in texts(value) for name in names(text) if name not in env]


def unset_words(name: str) -> str:
    """Words on a reference whose variable is not set, with the way out."""
    return f"${{env:{name}}}, and {name} is not set here: export {name}=... and try again"


def resolve(value: Any, node: str, origin: Callable[[str], str], env: Mapping[str, str] = os.environ) -> Any:
    """Plain data with every reference replaced by its variable's value (our own environment's by default).

    `origin` gives `file:line` of a path within the data. Raises InventoryError with one fault for each missing
    variable, which names file, line, node and NAME, and never a value.
    """
    faults = [
        f"{origin(path)}: node {node}: {path} refers to {unset_words(name)}" for path, name in missing(value, env)
    ]
    if faults:
        raise InventoryError(list(dict.fromkeys(faults)))
    return _resolved(value, env)


def _resolved(value: Any, env: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return REFERENCE_RE.sub(lambda m: env[m[1]], value)
    if isinstance(value, Mapping):
        return {key: _resolved(item, env) for key, item in value.items()}
    return type(value)(_resolved(item, env) for item in value) if isinstance(value, (list, tuple)) else value


_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
NAME_RE = re.compile(_NAME + r"\Z")
NAME_RULE = "must be letters, digits, '.', '_' and '-', at most 63, the first a letter or digit"
MAX_GPU = 9999
"""The largest GPU number; a slot's name has at most four digits."""
MAX_LEASES = 1000

FROM_FILE = "file"
_SECRET_ENV_RE = re.compile(r"(?:^|_)(?:PASSWORD|PASSWD|PASSPHRASE|TOKEN|SECRET|API_?KEY|CREDENTIALS?)(?:$|_)", re.I)
_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?|[0-9A-Fa-f]*:[0-9A-Fa-f:.]+(?:%[A-Za-z0-9._-]+)?)"
_USER = r"[A-Za-z0-9_][A-Za-z0-9_.@\\-]*\$?"
_HOP = rf"(?:{_USER}@)?(?:{_HOST}|\[[0-9A-Fa-f:.%]+\])(?::[0-9]{{1,5}})?"
_COUNT_RE = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4}))?\Z")
_TIME_RE = re.compile(r"(?:([0-9]+)d)?(?:([0-9]+)h)?(?:([0-9]+)m)?\Z")


def must(pattern: str, rule: str, filler: str | None = "x") -> AfterValidator:
    """A rule for text: the whole text must match the pattern, with its references replaced by `filler` (if given)."""
    compiled = re.compile(f"(?:{pattern})\\Z", re.DOTALL)

    def check(value: str) -> str:
        if not compiled.match(value if filler is None else with_filler(value, filler)):
            found = _SHELL_RE.search(value)
            raise ValueError(f"{rule}; a variable is written ${{env:{found[1]}}}" if found else rule)
        return value

    return AfterValidator(check)


def one_of(usual: Callable[[], Iterable[str]], every: Callable[[], Iterable[str]]) -> AfterValidator:
    """A rule for names that packages may add to. `usual`: the names that are known without looking at packages."""

    def check(value: str) -> str:
        if value not in usual() and value not in (legal := tuple(every())):
            raise ValueError(f"{shown(value)} is not legal{did_you_mean(value, legal)} (legal: {', '.join(legal)})")
        return value

    return AfterValidator(check)


def _numbers(rule: str, *words: str, most: int, count: bool = False) -> BeforeValidator:
    """A rule for a list of numbers, or one of some words. With `count` a single number will do too, and none may come
    twice."""

    def check(value: Any) -> Any:
        if value in words or (count and type(value) is int and 0 <= value <= most + 1):
            return value
        numbers = value if isinstance(value, (list, tuple)) else ()
        if not numbers or any(type(v) is not int or not 0 <= v <= most for v in numbers):
            raise ValueError(rule)
        if count and len(set(numbers)) != len(numbers):
            raise ValueError("names a GPU twice")
        return tuple(numbers)

    return BeforeValidator(check)


def _private(value: str) -> str:
    if not with_filler(value) or not value.isprintable():
        raise ValueError("must be text without control characters, and not empty")
    return value


def _no_secrets(value: dict[str, str], info: ValidationInfo) -> dict[str, str]:
    """Refuse secrets in a file. A node whose references are replaced is checked without `FROM_FILE`."""
    for name, text in value.items() if info.context == FROM_FILE else ():
        if text not in ("", "0", "1") and _SECRET_ENV_RE.search(name) and not has_reference(text):
            raise ValueError(f"{name} looks like a secret, which has no place in a file: write ${{env:{name}}} here")
    return value


def _count(value: Any) -> Any:
    if isinstance(value, tuple):
        return value
    found = _COUNT_RE.match(str(value)) if type(value) in (int, str) else None
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most <= MAX_LEASES:
        raise ValueError("must be a number of leases such as 4, or a range such as 1-8: at least one, and not fewer"
                         " at the end")  # fmt: skip
    return (least, most)


def seconds_of(text: str) -> int:
    """Seconds of a time such as 4h, 90m or 1d12h; 0 for any other text."""
    found = _TIME_RE.match(text)
    days, hours, minutes = (int(part or 0) for part in found.groups()) if found else (0, 0, 0)
    return ((days * 24 + hours) * 60 + minutes) * 60


def _time(value: Any) -> Any:
    if not isinstance(value, str) or not seconds_of(value):
        colons = type(value) is int and value >= 60
        hint = f": YAML reads a time with colons as a number, here {value}" if colons else ""
        raise ValueError(f"must be a time such as 4h, 90m or 1d12h{hint}")
    return value


LISTED = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
"""YAML's lists are tuples in the model."""
_TEXTS = BeforeValidator(lambda value: str(value) if type(value) is int else value)
_ONCE: AfterValidator = AfterValidator(lambda value: tuple(dict.fromkeys(value)))

Text = Annotated[str, StringConstraints(max_length=4096)]
ReferenceText = Annotated[Text, AfterValidator(_private)]
"""Text that may hold references."""
PlainText = Annotated[
    ReferenceText,
    must(r"(?:(?!\$\{env:).)*", "no reference can stand here: it is written into the node's scripts as it is", None),
]
Absolute = Annotated[
    ReferenceText, must(r"/[^:]*", "must be a path on the node that begins with '/', without ':'", "/x")
]
Host = Annotated[Text, must(_HOST, "must be a host name, an address or a name of your SSH configuration, alone")]
User = Annotated[Text, must(_USER, "must be a login name")]
Jump = Annotated[
    Text, must(f"none|{_HOP}(?:,{_HOP})*", "must be [USER@]HOST[:PORT], several with ',' between, or none")
]
Port = Annotated[int, Field(ge=1, le=65535)]
Units = Annotated[int, Field(ge=1, le=100_000)]
Image = Annotated[Text, must(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*", "must be an image such as rocm/atom:latest")]
Gpus = Annotated[
    Literal["auto"] | int | tuple[int, ...],
    _numbers("must be auto, a number of GPUs (0: use none), or a list of GPU numbers such as [0, 1]", "auto",
             most=MAX_GPU, count=True),
]  # fmt: skip
Numa = Annotated[
    Literal["auto", "none"] | tuple[int, ...],
    _numbers("must be auto, none, or a list with the NUMA node of each slot such as [0, 0, 1, 1]", "auto", "none",
             most=1023),
]  # fmt: skip
Mounts = Annotated[
    tuple[
        Annotated[
            Text,
            must(rf"(?:(?:\x01|{_NAME})[A-Za-z0-9._\x01-]*|[/\x01][^:]*):/[^:]*(?::.*)?",
                 "must be SOURCE:TARGET or SOURCE:TARGET:ro, SOURCE a path on the node, TARGET one in it", "\x01"),
            must(r"(?!(?:.*[:/])?\.\.?(?:[:/]|\Z)).*", "must be paths without '.' and '..'"),
            must(r"[^:]*:[^:]*(?::[a-zA-Z]+(?:,[a-zA-Z]+)*)?",
                 "what follows the second ':' must be options such as ro"),
        ],
        ...,
    ],
    LISTED,
]  # fmt: skip
Devices = Annotated[
    tuple[
        Annotated[
            Text,
            must(r"(?!.*/\.\.(?:/|\Z))/dev/[A-Za-z0-9._/-]+(?::/[A-Za-z0-9._/-]+(?::[rwm]{1,3})?)?",
                 "must be a device such as /dev/kfd, or /dev/a:/dev/b:rw", None),
        ],
        ...,
    ],
    LISTED,
]  # fmt: skip
Capabilities = Annotated[
    tuple[
        Annotated[
            Text,
            must(r"(?!(?i:CAP_)?(?i:ALL)\Z).*", "ALL is as good as --privileged: name the capabilities that are needed",
                 None),
            must(r"[A-Z][A-Z_]*", "must be a capability such as SYS_PTRACE", None),
        ],
        ...,
    ],
    LISTED,
]  # fmt: skip
Groups = Annotated[
    tuple[
        Annotated[
            str, _TEXTS, must(_NAME, "must be auto, a group's number on the node, or its name in the image", None),
            WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string"}]}),
        ],
        ...,
    ],
    LISTED,
]  # fmt: skip
SecurityOptions = Annotated[
    tuple[Annotated[Text, must(r"[a-z][A-Za-z0-9._:=/-]*", "must be an option such as seccomp=unconfined")], ...],
    LISTED,
]
Network = Annotated[Text, must(r"[A-Za-z0-9][A-Za-z0-9._-]*", "must be none, host, bridge or a network's name")]
Size = Annotated[Text, must(r"[1-9][0-9]*[bkmgBKMG]?", "must be a size in bytes, or with k, m or g, such as 16G")]
ContainerUser = Annotated[
    Text, must(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(?::[A-Za-z0-9_][A-Za-z0-9_.-]*)?", "must be USER or UID:GID")
]
Gfx = Annotated[Text, must(r"[A-Za-z0-9][A-Za-z0-9_.:+-]{0,63}", "must be a name such as gfx950")]
GpuArchs = Annotated[Text, must(r"gfx[0-9a-z]+(?:;gfx[0-9a-z]+)*", "must be chips such as gfx950 or gfx942;gfx950")]
Words = Annotated[tuple[PlainText, ...], LISTED]
Label = Annotated[Text, must(r"[A-Za-z0-9][A-Za-z0-9._,-]{0,62}", "must be a plain name without references")]
Labels = Annotated[tuple[Annotated[str, must(_NAME, NAME_RULE, None)], ...], LISTED, _ONCE]
EnvName = Annotated[
    str,
    must(r"[A-Za-z_][A-Za-z0-9_]*", "a variable's name must be letters, digits and '_', and not begin with a digit",
         None),
]  # fmt: skip
CompilerVariable = Annotated[
    EnvName, must(r"[A-Z0-9_]+_HIP_CLANG_PATH", "must be a variable such as GEMM_A4W4_BLOCKWISE_HIP_CLANG_PATH")
]
Env = Annotated[
    dict[EnvName, Annotated[str, StringConstraints(max_length=32768), must(r"[^\0\n\r]*", "must be one line of text")]],
    AfterValidator(_no_secrets),
]
LeaseCount = Annotated[
    tuple[int, int],
    BeforeValidator(_count),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": "^[0-9]+(-[0-9]+)?$"}]}),
]
Time = Annotated[str, BeforeValidator(_time), WithJsonSchema({"type": "string", "pattern": "^([0-9]+[dhm])+$"})]
