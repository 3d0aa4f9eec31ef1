"""The JSON schema of inventories, for editors: completion, hover texts, and most faults as one types.

It comes from the models. What a schema cannot say (which options fit together, the forms of text) it lets pass:
`gemmfleet inventory check` has the last word.
"""

from __future__ import annotations

import json
from typing import Any

from orchestrator.inventory.model import InventoryFile
from orchestrator.inventory.values import NAME_RE

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
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": TITLE}


def dumps() -> str:
    """The text of inventories/inventory.schema.json."""
    return json.dumps(json_schema(), indent=1) + "\n"


def _or_nothing(schema: dict[str, Any]) -> dict[str, Any]:
    """`name:` without a value is a node (or defaults) without options."""
    said = {k: schema.pop(k) for k in ("description",) if k in schema}
    return {"anyOf": [schema, {"type": "null"}], **said}


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
