"""Reads the routings that a server captured (`tune --topk-ids DIR`) into the option `captured` of an engine's tuner.

SGLang's README of its MoE tuning (benchmark/kernels/fused_moe_triton/README.md) has a server save them: a line in the
model's MoE layer, run for large batches,

    torch.save(topk_output.topk_ids, f"{dir}/topk_ids_layer{layer}_idx{n}.pt")      an integer tensor [tokens, topk]

which `load_topk_ids` of its tuning_fused_moe_triton_sep.py reads (`--topk-ids-dir`). A row holds the experts of a
token, -1 in the rows of padding. The same files do here. `read_captured` checks some of them and counts the tokens of
each expert. A node gets the counts as a text, `[[512, 38, ...], ...]`, a list for each file, and draws the tokens of
every M by them (`worker/tuners/engines/moe_problem.py`). The files are not trusted: torch reads them with
`weights_only=True`.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.errors import InputError
from orchestrator.shapes.model import ShapeList
from worker.families import Family
from worker.tuners.engines.specs import MOST_CAPTURES

if TYPE_CHECKING:
    import torch

_NAME = re.compile(r"topk_ids_layer(\d{1,6})_idx(\d{1,6})\.pt\Z")
MOST_BYTES = 64 << 20
MOST_TOKENS = 1 << 20
MOST_TOPK = 64
HOW = "SGLang's benchmark/kernels/fused_moe_triton/README.md says how a server saves them"


def read_captured(folder: Path, listed: ShapeList, family: Family) -> str:
    """The option `captured` from a folder of captures, at most MOST_CAPTURES of them, evenly over the layers. Raises
    InputError with every fault."""
    if "topk" not in family.key_names:
        raise InputError(f"--topk-ids is for mixtures of experts (family fmoe), and the shapes are of {family.name}")
    files = _choose_files(folder)
    places = [family.key_names.index(name) for name in ("expert", "topk")]
    layers = {tuple(int(shape.key[place]) for place in places): shape.key for shape in listed.shapes}
    faults: list[str] = []
    counts: list[list[int]] = []
    for path in files:
        try:
            ids = _load(path)
            for experts, topk in layers:
                counts.append(_count_tokens(ids, experts, topk))
        except ValueError as e:
            faults.append(f"{path}: {e}")
    if len(layers) > 1:
        sizes = ", ".join(f"{experts} experts, topk {topk}" for experts, topk in sorted(layers))
        faults.append(f"--topk-ids has the captures of one model, and {listed.source} has layers of {sizes}: split it")
    if faults:
        raise InputError(faults)
    return json.dumps(counts, separators=(",", ":"))


def _choose_files(folder: Path) -> list[Path]:
    """The files to read, by layer and number. Raises InputError."""
    try:
        matches = [(_NAME.match(path.name), path) for path in folder.iterdir()]
    except OSError as e:
        raise InputError(f"--topk-ids {folder}: not a folder that can be read ({e.strerror}); {HOW}") from e
    by_place = {(int(match[1]), int(match[2])): path for match, path in matches if match}
    if not by_place:
        raise InputError(f"--topk-ids {folder}: holds no topk_ids_layerL_idxN.pt; {HOW}")
    files = [by_place[place] for place in sorted(by_place)]
    step = max(1.0, len(files) / MOST_CAPTURES)
    return [files[int(i * step)] for i in range(min(len(files), MOST_CAPTURES))]


def _load(path: Path) -> torch.Tensor:
    """The tensor in a file, [tokens, topk]. Raises ValueError, also for what torch cannot read."""
    try:
        import torch
    except ImportError as e:
        raise ValueError("reading it needs torch on this machine: pip install torch") from e
    if not path.is_file():
        raise ValueError("no regular file")
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"larger than {MOST_BYTES >> 20} MiB; save the tensor of one layer and batch only")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other forms of pickle, which are refused anyway
            ids: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:
        reason = type(e).__name__
        raise ValueError(f"torch cannot load it as plain tensors ({reason}); save topk_output.topk_ids itself") from e
    if not isinstance(ids, torch.Tensor) or not _has_plain_values(ids):
        raise ValueError("holds no plain tensor; save topk_output.topk_ids itself")
    if ids.dtype not in (torch.int32, torch.int64) or ids.dim() != 2:
        raise ValueError(f"a tensor {list(ids.shape)} of {ids.dtype}, not of whole numbers [tokens, topk]")
    if not (1 <= ids.shape[0] <= MOST_TOKENS and 1 <= ids.shape[1] <= MOST_TOPK):
        raise ValueError(f"a tensor {list(ids.shape)}; up to {MOST_TOKENS} tokens and topk {MOST_TOPK} can be read")
    return ids


def _has_plain_values(ids: torch.Tensor) -> bool:
    is_sparse = str(ids.layout) != "torch.strided"
    return not (is_sparse or ids.is_nested or ids.is_quantized or ids.is_meta)


def _count_tokens(ids: torch.Tensor, experts: int, topk: int) -> list[int]:
    """The number of tokens of each expert. Raises ValueError if the layer cannot have had this routing."""
    if ids.shape[1] != topk:
        raise ValueError(f"{ids.shape[1]} experts a token, and the shapes have topk {topk}: leave other models out")
    ids = ids[(ids >= 0).all(dim=1)].long()
    if not len(ids):
        raise ValueError("every row is padding (-1); capture a batch with tokens")
    if int(ids.max()) >= experts:
        raise ValueError(
            f"names expert {int(ids.max())}, and the shapes have {experts} experts: capture the rank that is tuned"
        )
    ordered = ids.sort(dim=1).values
    if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        raise ValueError("a token has an expert twice, which no router gives")
    counts: Sequence[int] = ids.flatten().bincount(minlength=experts).tolist()
    return list(counts)
