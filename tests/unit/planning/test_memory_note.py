"""Shapes that cannot fit into a device's memory are pointed out before the start."""

from __future__ import annotations

from pathlib import Path

from orchestrator.controller.node_plan import device_memory, plan_nodes
from orchestrator.families import get_family
from orchestrator.inventory.load import load_inventory
from orchestrator.planning.plan import memory_note
from orchestrator.shapes.model import Shape, operand_bytes
from worker.device import memory_bytes

BF16 = ("False", "torch.bfloat16", "torch.bfloat16", "False", "False")


def test_operand_bytes_of_each_width() -> None:
    assert operand_bytes(get_family("a16w16"))((2, 3, 5, *BF16)) == 2 * (10 + 15 + 6)
    assert operand_bytes(get_family("a4w4_blockscale"))((2, 4, 32)) == (2 * 32 + 4 * 32) / 2 + 2 * 8
    assert operand_bytes(get_family("a8w8"))((2, 4, 32, "torch.int8")) == 2 * 32 + 4 * 32 + 2 * 8
    assert operand_bytes(get_family("batched_bf16"))((7, 2, 3, 5)) == 7 * 2 * (10 + 15 + 6)
    fmoe = get_family("fmoe")
    assert operand_bytes(fmoe)(tuple(1 for _ in fmoe.key_names)) == 0


def test_what_cannot_fit_is_named_largest_first() -> None:
    family = get_family("a16w16")
    shapes = [Shape(1, (1, 2, 3, *BF16)), Shape(2, (10**9, 1280, 8192, *BF16)), Shape(3, (10**9, 64, 64, *BF16))]
    (note,) = memory_note(shapes, family, 80 * 2**30)
    assert note.startswith("the operands of 2 shapes do not fit into the device's memory of 80 GiB, and will fail: ")
    assert note.index("1000000000x1280x8192 (17") < note.index("1000000000x64x64")
    assert "1000000000x64x64 (238 GiB)" in note
    assert memory_note(shapes[:1], family, 80 * 2**30) == []
    assert memory_note(shapes, family, None) == []


def test_a_machine_without_a_gpu_has_its_own_memory(tmp_path: Path) -> None:
    inventory = tmp_path / "inv.yaml"
    inventory.write_text("nodes: {here: {gpus: 0}}\n")
    nodes = plan_nodes(load_inventory(inventory), "r", tmp_path)
    assert device_memory(nodes, {}) == memory_bytes()
