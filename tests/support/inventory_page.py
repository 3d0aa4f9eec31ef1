"""The files made from the table of inventory options (orchestrator/inventory/model.py): the tables of
docs/reference/inventory.md, and the schema for editors. `python -m tests.support.inventory_page` writes both again."""

from __future__ import annotations

import re
from collections.abc import Iterator

from orchestrator.inventory.model import (
    AiterSection,
    Defaults,
    DockerSection,
    NodeOptions,
    SglangSection,
    Strict,
    VllmSection,
    dumps,
)
from tests.paths import ROOT

PAGE = ROOT / "docs" / "reference" / "inventory.md"
SCHEMA = ROOT / "inventories" / "inventory.schema.json"
HEAD = "| option | value (default) | meaning |\n|---|---|---|\n"


def rows(model: type[Strict], prefix: str = "", but: type[Strict] = Strict) -> Iterator[str]:
    """A row for each option of a section; `but`: those of this one are left out."""
    for name, field in model.model_fields.items():
        if name not in but.model_fields:
            value = str(field.title).replace("*", r"\*")
            yield f"| `{prefix}{name}` | {value} | {field.description} |"


def with_tables(page: str) -> str:
    """The page with its tables made again, in their order."""
    tables = iter((rows(NodeOptions), rows(DockerSection, "docker."), rows(AiterSection, "aiter."),
                   rows(VllmSection, "vllm."), rows(SglangSection, "sglang."),
                   rows(Defaults, but=NodeOptions)))  # fmt: skip
    return re.sub(re.escape(HEAD) + r"(?:\|.*\n)+", lambda _: HEAD + "\n".join(next(tables)) + "\n", page)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
    SCHEMA.write_text(dumps())
