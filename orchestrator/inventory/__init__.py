"""Inventories: YAML files of the nodes and of how workers start on them.

The format is described for users in docs/reference/inventory.md.
"""

from __future__ import annotations

from orchestrator.inventory.load import MAX_BYTES, check_references, limit, load_inventory, resolved
from orchestrator.inventory.model import Defaults, DockerSection, Inventory, Node, NodeOptions

__all__ = [
    "MAX_BYTES",
    "Defaults",
    "DockerSection",
    "Inventory",
    "Node",
    "NodeOptions",
    "check_references",
    "limit",
    "load_inventory",
    "resolved",
]
