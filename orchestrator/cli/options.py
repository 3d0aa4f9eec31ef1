"""Options and arguments that several commands share, and groups of them that a command takes as one parameter."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_origin, get_type_hints

import typer
import yaml

from orchestrator.cli.printer import finish_page
from orchestrator.errors import InputError
from orchestrator.pages import Page
from orchestrator.paths import DEFAULT_RUNS, RunSettings

RunArg = Annotated[
    str | None,
    typer.Argument(metavar="[RUN]", help="Run id or a prefix of it, or its folder; default: the latest."),
]
RunsOpt = Annotated[Path, typer.Option("--runs", help="Folder of the runs.", metavar="DIR")]
JsonOpt = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]


def setting_option(name: str) -> Any:
    """Return typer's option for a setting of a run, from the flag that RunSettings has for it."""
    annotation = get_type_hints(RunSettings, include_extras=True)[name]
    (flag,) = annotation.__metadata__
    return typer.Option(flag.flag, help=flag.help, min=flag.minimum, metavar=flag.metavar)


BusyOpt = Annotated[Literal["wait", "skip", "share"] | None, setting_option("busy")]
AcceptNewHostKeysOpt = Annotated[bool, setting_option("accept_new_host_keys")]
BuildOpt = Annotated[
    str | None,
    typer.Option("--build", metavar="TREE|IMAGE", help="AITER that will load the rows: its folder, or an image."),
]
BuildNodesOpt = Annotated[
    Path | None,
    typer.Option("-i", "--inventory", metavar="INV", help="Nodes that may have the image of --build."),
]
InventoryOpt = Annotated[
    Path | None,
    typer.Option("-i", "--inventory", help="Nodes to use; default: this machine.", metavar="INV"),
]
TableFamilyOpt = Annotated[
    str | None, typer.Option("--family", metavar="F", help="Family, where name and columns of a table are ambiguous.")
]
FamilyOpt = Annotated[str | None, typer.Option("--family", help="GEMM family; default: the inventory's.", metavar="F")]
LimitOpt = Annotated[
    str | None, typer.Option("--limit", help="Only nodes with this label (or of this name).", metavar="LABEL")
]
UntilGainOpt = Annotated[
    str | None,
    typer.Option("--until-gain", help="With --by-value: stop at this share of the expected gain.", metavar="95%"),
]
DetachOpt = Annotated[
    bool, typer.Option("--detach", help="Leave the controller in the background; prints the run's id.")
]
GpuHoursOpt = Annotated[
    float | None,
    typer.Option("--gpu-hours", min=0.0, help="With --by-value: stop after this many GPU hours.", metavar="H"),
]


class RunFlags(NamedTuple):
    """Group: the folder and the nodes of a run that a command plans, and the ways to start it."""

    runs: RunsOpt = DEFAULT_RUNS
    limit: LimitOpt = None
    plan: Annotated[bool, typer.Option("--plan", help="Print what would run where; start and write nothing.")] = False
    detach: DetachOpt = False
    json_: JsonOpt = False


class SettingFlags(dict[str, Any]):
    """Group: the values of all flags that RunSettings has, by the setting's name: `{"watchdog_s": 300.0, ...}`."""


def typer_function(command: Callable[..., Page | None]) -> Callable[..., None]:
    """Return the command in the form that typer needs: it prints its page, and has an option for each field of a group.

    A parameter whose type is a named tuple or SettingFlags is a group. Its options take the parameter's place: of
    `tune(shapes, *, run: RunFlags)` typer gets `run(*, shapes, runs, limit, plan, ...)`, which makes the RunFlags. A
    command that returns a page has --json. Raises typer.Exit with the page's exit code, or the page's error.
    """
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, tuple[Any, list[str]]] = {}  # by parameter: the type, the names of its options
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        group = parameter.annotation
        if group is SettingFlags or hasattr(group, "_fields"):
            flags = _setting_flags() if group is SettingFlags else list(_flags_of(group))
            groups[parameter.name] = (group, [flag.name for flag in flags])
            parameters += flags
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    wants_json = any(parameter.name == "json_" for parameter in parameters)
    returns_page = signature.return_annotation is not None
    if returns_page and not wants_json:
        parameters.append(_keyword("json_", JsonOpt, default=False))

    def run(**values: Any) -> None:
        as_json = values.get("json_", False)
        if not wants_json:
            values.pop("json_", None)
        for name, (group, options) in groups.items():
            values[name] = group(**{option: values.pop(option) for option in options})
        page = command(**values)
        code = 0 if page is None else finish_page(page, as_json=as_json)
        if code:
            raise typer.Exit(code)

    run.__name__ = command.__name__
    run.__doc__ = command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _flags_of(group: Any) -> Iterator[inspect.Parameter]:
    for name, annotation in get_type_hints(group, include_extras=True).items():
        yield _keyword(name, annotation, default=group._field_defaults.get(name, inspect.Parameter.empty))


def _setting_flags() -> list[inspect.Parameter]:
    """Return a parameter for each setting of a run that has a flag."""
    parameters = []
    for setting in fields(RunSettings):
        annotation = get_type_hints(RunSettings, include_extras=True)[setting.name]
        if get_origin(annotation) is Annotated:
            kind: Any = annotation.__origin__
            of_typer: Any = Annotated[kind, setting_option(setting.name)]
            parameters.append(_keyword(setting.name, of_typer, default=setting.default))
    return parameters


def _keyword(name: str, annotation: Any, *, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def parse_tuner_options(pairs: list[str]) -> dict[str, Any]:
    """Return the options of `NAME=VALUE` words, with VALUE read as YAML: 3, true and [1, 2] get their types.

    Raises InputError.
    """
    options: dict[str, Any] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not name:
            raise InputError(f"--tuner-option {pair!r} is not NAME=VALUE")
        try:
            options[name] = yaml.safe_load(value)
        except yaml.YAMLError as e:
            raise InputError(f"--tuner-option {name}: {e}") from e
    return options


def parse_share(text: str | None) -> float | None:
    """Return the share of `95%` or `0.95`. Raise InputError."""
    if text is None:
        return None
    try:
        share = float(text.removesuffix("%"))
    except ValueError:
        share = 0.0
    if text.endswith("%"):
        share /= 100.0
    if not 0 < share <= 1:
        raise InputError(f"--until-gain: {text!r} is not a share such as 95%")
    return share
