"""The types of an inventory's options: each kind of value with its rule, as pydantic checks it.

A rule raises ValueError that says what to write. It does not repeat a text, because that may be private; only names of
a fixed list and numbers are shown. In a file, the rules are checked on the text around references; after resolving, on
the whole text. `model.py` has the options.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, ValidationInfo, WithJsonSchema

from orchestrator.files.faults import shown
from orchestrator.inventory.references import has_reference, with_filler
from worker.text import did_you_mean

_SHELL_RE = re.compile(r"\$\{?([A-Za-z_]\w{0,99})")
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
NAME_RE = re.compile(_NAME + r"\Z")
NAME_RULE = "must be letters, digits, '.', '_' and '-', at most 63, the first a letter or digit"
MAX_GPU = 9999
"""The largest GPU number; a slot's name has at most four digits."""
MAX_LEASES = 1000

FROM_FILE = "file"
"""The context of a check of a file's texts, whose references are not resolved."""
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
        if compiled.match(value if filler is None else with_filler(value, filler)):
            return value
        shell_variable = _SHELL_RE.search(value)
        if shell_variable:
            raise ValueError(f"{rule}; a variable is written ${{env:{shell_variable[1]}}}")
        raise ValueError(rule)

    return AfterValidator(check)


def one_of(usual: Callable[[], Iterable[str]], every: Callable[[], Iterable[str]]) -> AfterValidator:
    """A rule for names that packages may add to. `usual`: the names that are known without looking at packages."""

    def check(value: str) -> str:
        if value in usual():
            return value
        legal = tuple(every())
        if value not in legal:
            raise ValueError(f"{shown(value)} is not legal{did_you_mean(value, legal)} (legal: {', '.join(legal)})")
        return value

    return AfterValidator(check)


def _numbers(rule: str, *words: str, most: int, count: bool = False) -> BeforeValidator:
    """A rule for a list of numbers, or one of some words. With `count` a single number will do too, and none may come
    twice."""

    def check(value: Any) -> Any:
        if value in words:
            return value
        if count and type(value) is int and 0 <= value <= most + 1:
            return value
        if not isinstance(value, (list, tuple)) or not value:
            raise ValueError(rule)
        if any(type(number) is not int or not 0 <= number <= most for number in value):
            raise ValueError(rule)
        if count and len(set(value)) != len(value):
            raise ValueError("names a GPU twice")
        return tuple(value)

    return BeforeValidator(check)


def _private(value: str) -> str:
    if not with_filler(value) or not value.isprintable():
        raise ValueError("must be text without control characters, and not empty")
    return value


def _no_secrets(value: dict[str, str], info: ValidationInfo) -> dict[str, str]:
    """Refuse secrets in a file. A node whose references are replaced is checked without `FROM_FILE`."""
    if info.context != FROM_FILE:
        return value
    for name, text in value.items():
        if text not in ("", "0", "1") and _SECRET_ENV_RE.search(name) and not has_reference(text):
            raise ValueError(f"{name} looks like a secret, which has no place in a file: write ${{env:{name}}} here")
    return value


def _count(value: Any) -> Any:
    if isinstance(value, tuple):
        return value
    least = most = 0
    match = _COUNT_RE.match(str(value)) if type(value) in (int, str) else None
    if match:
        least = int(match[1])
        most = int(match[2] or match[1])
    if not 1 <= least <= most <= MAX_LEASES:
        rule = "must be a number of leases such as 4, or a range such as 1-8: at least one, and not fewer at the end"
        raise ValueError(rule)
    return (least, most)


def seconds_of(text: str) -> int:
    """Seconds of a time such as 4h, 90m or 1d12h; 0 for any other text."""
    match = _TIME_RE.match(text)
    if match is None:
        return 0
    days, hours, minutes = (int(part or 0) for part in match.groups())
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
Host = Annotated[
    Text,
    must(
        _HOST,
        "must be a host name, an address or a name of your SSH configuration, alone; the login goes into user:, the"
        " port into port:",
    ),
]
User = Annotated[Text, must(_USER, "must be a login name")]
Jump = Annotated[
    Text, must(f"none|{_HOP}(?:,{_HOP})*", "must be [USER@]HOST[:PORT], several with ',' between, or none")
]
Port = Annotated[int, Field(ge=1, le=65535)]
Units = Annotated[int, Field(ge=1, le=100_000)]
Image = Annotated[Text, must(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*", "must be an image such as rocm/atom:latest")]
Gpus = Annotated[
    Literal["auto"] | int | tuple[int, ...],
    _numbers(
        "must be auto, a number of GPUs (0: use none), or a list of GPU numbers such as [0, 1]",
        "auto",
        most=MAX_GPU,
        count=True,
    ),
]
Numa = Annotated[
    Literal["auto", "none"] | tuple[int, ...],
    _numbers(
        "must be auto, none, or a list with the NUMA node of each slot such as [0, 0, 1, 1]", "auto", "none", most=1023
    ),
]
Mounts = Annotated[
    tuple[
        Annotated[
            Text,
            must(
                rf"(?:(?:\x01|{_NAME})[A-Za-z0-9._\x01-]*|[/\x01][^:]*):/[^:]*(?::.*)?",
                "must be SOURCE:TARGET or SOURCE:TARGET:ro, SOURCE a path on the node, TARGET one in it",
                "\x01",
            ),
            must(r"(?!(?:.*[:/])?\.\.?(?:[:/]|\Z)).*", "must be paths without '.' and '..'"),
            must(
                r"[^:]*:[^:]*(?::[a-zA-Z]+(?:,[a-zA-Z]+)*)?", "what follows the second ':' must be options such as ro"
            ),
        ],
        ...,
    ],
    LISTED,
]
Devices = Annotated[
    tuple[
        Annotated[
            Text,
            must(
                r"(?!.*/\.\.(?:/|\Z))/dev/[A-Za-z0-9._/-]+(?::/[A-Za-z0-9._/-]+(?::[rwm]{1,3})?)?",
                "must be a device such as /dev/kfd, or /dev/a:/dev/b:rw",
                None,
            ),
        ],
        ...,
    ],
    LISTED,
]
Capabilities = Annotated[
    tuple[
        Annotated[
            Text,
            must(
                r"(?!(?i:CAP_)?(?i:ALL)\Z).*",
                "ALL is as good as --privileged: name the capabilities that are needed",
                None,
            ),
            must(r"[A-Z][A-Z_]*", "must be a capability such as SYS_PTRACE", None),
        ],
        ...,
    ],
    LISTED,
]
Groups = Annotated[
    tuple[
        Annotated[
            str,
            _TEXTS,
            must(_NAME, "must be auto, a group's number on the node, or its name in the image", None),
            WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string"}]}),
        ],
        ...,
    ],
    LISTED,
]
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
    must(
        r"[A-Za-z_][A-Za-z0-9_]*", "a variable's name must be letters, digits and '_', and not begin with a digit", None
    ),
]
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
