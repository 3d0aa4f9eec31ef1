"""Renders the scripts that run on a node, and the page of a run. Undefined names are errors; every value goes through
`quote` in a script, and is escaped by Jinja in the page."""

from __future__ import annotations

import shlex
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.errors import TemplateError

if TYPE_CHECKING:
    import jinja2


def data_folder(name: str) -> Path:
    """`templates`, `inventories` or `examples`: beside the packages in a checkout, inside the package in a wheel."""
    here = Path(__file__).resolve().parent
    for folder in (here / "_data" / name, here.parent / name):
        if folder.is_dir():
            return folder
    raise TemplateError(f"the folder {name!r} is missing from this installation of gemmfleet; install it again")


def quote(value: object) -> str:
    """Quote one word for a POSIX shell. Control characters other than tab and newline are refused."""
    text = str(value)
    if any(ord(c) < 32 and c not in "\t\n" for c in text):
        raise TemplateError(f"control character in {text!r}")
    return shlex.quote(text)


def quoted(value: object) -> str:
    """Quote a word for a Dockerfile, where quotes, backslashes and $ stand for themselves."""
    text = str(value)
    if any(ord(c) < 32 for c in text):
        raise TemplateError(f"control character in {text!r}")
    return '"' + "".join("\\" + c if c in '"\\$' else c for c in text) + '"'


@cache
def _environment() -> jinja2.Environment:
    import jinja2

    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(data_folder("templates")),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=jinja2.select_autoescape(["html.j2"], default_for_string=False),  # for a shell, `quote` escapes
    )
    env.filters["quote"] = quote
    env.filters["quoted"] = quoted
    return env


def render(template: str | Path, values: dict[str, Any]) -> str:
    """Text of `templates/<template>`, or of a template file elsewhere (a Path).

    Raises TemplateError naming template, line and what is missing.
    """
    import jinja2

    name = template if isinstance(template, Path) else f"templates/{template}"
    try:
        environment = _environment()
        if isinstance(template, Path):
            return environment.from_string(template.read_text()).render(values)
        return environment.get_template(template).render(values)
    except jinja2.TemplateNotFound as e:  # before OSError, which it is as well
        raise TemplateError(f"templates/{e.name}: there is no such template; install gemmfleet again") from e
    except OSError as e:
        raise TemplateError(f"{name}: {e.strerror}") from e
    except jinja2.TemplateSyntaxError as e:
        raise TemplateError(f"{name}:{e.lineno}: {e.message}") from e
    except jinja2.UndefinedError as e:
        raise TemplateError(f"{name}: {e.message}") from e
