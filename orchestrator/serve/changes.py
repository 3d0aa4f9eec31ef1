"""What is new in a document beside an older one: whole parts, and of the table of shapes single rows."""

from __future__ import annotations

from typing import Any

Document = dict[str, Any]


def changes(old: Document | None, new: Document) -> dict[str, Any]:
    """{"full": document}, or {"parts": {name: value}, "rows": [[number, row]]}. Applied to `old` it gives `new`."""
    if old is None or old.keys() != new.keys() or old["columns"] != new["columns"] or not _aligned(old, new):
        return {"full": new}
    rows = [[i, row] for i, (was, row) in enumerate(zip(old["shapes"], new["shapes"], strict=True)) if was != row]
    return {"parts": {k: v for k, v in new.items() if k != "shapes" and old[k] != v}, "rows": rows}


def _aligned(old: Document, new: Document) -> bool:
    """Whether the same shapes stand in the same places, under the same backends."""
    if [b["name"] for b in old["backends"]] != [b["name"] for b in new["backends"]]:
        return False
    return [r[0] for r in old["shapes"]] == [r[0] for r in new["shapes"]]
