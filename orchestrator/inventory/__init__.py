"""Inventories: the YAML that says which nodes there are and how workers start on them.

The format is described for users in docs/inventory.md.
"""

from __future__ import annotations

from orchestrator.inventory.load import MAX_BYTES, limit, load_inventory
from orchestrator.inventory.model import Defaults, Inventory, Node, NodeOptions

__all__ = ["MAX_BYTES", "Defaults", "Inventory", "Node", "NodeOptions", "limit", "load_inventory"]
