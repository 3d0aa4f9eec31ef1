"""Routings captured from a server: SGLang's files become counts of tokens by expert, or an error names the file."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import InputError
from orchestrator.families import get_family
from orchestrator.shapes.captured_routings import read_captured
from orchestrator.shapes.reader import read_shapes
from tests.support.marks import WITH_TORCH
from worker.tuners.engines.specs import captured_rule

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = WITH_TORCH
MOE = "token,model_dim,inter_dim,expert,topk\n16,128,128,4,2\n"
IDS = torch.tensor([[0, 1], [0, 2], [-1, -1], [0, 1]])


def read(folder: Path, shapes: str = MOE) -> Any:
    family = get_family("fmoe" if "expert" in shapes else "a16w16")
    (folder / "shapes.csv").write_text(shapes)
    return json.loads(read_captured(folder / "captures", read_shapes(folder / "shapes.csv", family), family))


def save(folder: Path, ids: Any, layer: int = 3, number: int = 0) -> None:
    (folder / "captures").mkdir(exist_ok=True)
    torch.save(ids, folder / "captures" / f"topk_ids_layer{layer}_idx{number}.pt")


def test_tokens_are_counted_in_captures_of_all_layers(tmp_path: Path) -> None:
    save(tmp_path, IDS)
    (tmp_path / "captures" / "notes.txt").touch()
    assert read(tmp_path) == [[3, 2, 1, 0]]
    for layer in range(3, 61):
        save(tmp_path, torch.tensor([[layer % 4, (layer + 1) % 4]] * layer).int(), layer, 1)
    counts = read(tmp_path)
    assert len(counts) == 16
    assert max(counts[0]) == 3
    assert max(counts[-1]) > 50, "the last layers too"
    assert captured_rule(json.dumps(counts)) == tuple(map(tuple, counts))


class Hostile:
    def __reduce__(self) -> Any:
        return os.abort, ()


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (IDS.float(), "torch.float32, not of whole numbers"),
        (IDS[0], "not of whole numbers"),
        (IDS[:, :1], "1 experts a token, and the shapes have topk 2"),
        (IDS + 2, "names expert 4, and the shapes have 4 experts"),
        (torch.full((2, 2), -1), "every row is padding"),
        (torch.tensor([[1, 1]]), "an expert twice"),
        (torch.zeros(1, dtype=torch.long).expand(1 << 40, 2), r"up to 1048576 tokens"),
        ({"ids": IDS}, "holds no plain tensor"),
        # made by the test: the first one that is made imports torch's compiler, which takes seconds
        (lambda: torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged), "holds no plain tensor"),
        (b"", "cannot load it as plain tensors"),
        pytest.param(b"\x80\x02" + b"]" * 9999 + b".", "cannot load it as plain tensors", id="deep"),
        (pickle.dumps(Hostile()), "cannot load it as plain tensors"),
    ],
)
def test_a_file_that_is_no_capture_of_the_layer_is_named(tmp_path: Path, ids: Any, words: str) -> None:
    save(tmp_path, ids() if callable(ids) else ids)
    path = tmp_path / "captures" / "topk_ids_layer3_idx0.pt"
    if isinstance(ids, bytes):
        path.write_bytes(ids)
    with pytest.raises(InputError, match=words) as error:
        read(tmp_path)
    assert str(error.value).startswith(f"{path}: ")


def test_a_wrong_folder_family_or_list_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"not a folder that can be read .*README.md says how"):
        read(tmp_path)
    (tmp_path / "captures").mkdir()
    with pytest.raises(InputError, match=r"holds no topk_ids_layerL_idxN\.pt"):
        read(tmp_path)
    save(tmp_path, IDS)
    with pytest.raises(InputError, match="captures of one model"):
        read(tmp_path, MOE + "16,128,128,8,2\n")
    with pytest.raises(InputError, match="the shapes are of a16w16"):
        read(tmp_path, "M,N,K\n1,2,3\n")


@pytest.mark.parametrize("text", ["x", "[[0, 0]]", "[[1], [1, 2]]", "[[-1]]", "[1]", '[["1"]]', 3])
def test_what_a_node_gets_is_checked_again(text: Any) -> None:
    with pytest.raises(ValueError, match=r"lists of the tokens|no text"):
        captured_rule(text)
