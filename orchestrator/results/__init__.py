from typing import Any

Document = dict[str, Any]
"""A JSON object that a command prints with --json, or a part of it (docs/reference/files.md, commands.md)."""
