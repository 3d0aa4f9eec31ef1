"""Output of AITER's tuners, of every date, as events; and the shape that a printed key means."""

from __future__ import annotations

import pytest

from worker.process import Splitter
from worker.tuners.aiter.progress import ShapeKeys, key_cells, parse_line

COLUMNS = ("M", "N", "K")
KEYS = ShapeKeys(COLUMNS, {7: {"M": 64, "N": 576, "K": 7168}, 8: {"M": 128, "N": 576, "K": 7168}})


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("Memory access fault by GPU node-2 (Agent handle: 0x55) on address 0x7f3c2a400000. Reason: Unknown.", "fault"),
        ("\033[1;31m[GPU Fault]\033[0m Task 3 failed with AcceleratorError: HIP error", "fault"),
        ("Fatal Python error: Segmentation fault", "fault"),
        ("[aiter] [Mapping Error] Task 2 - Process PID not in GPU map: KeyError - 17", "mapping"),
        ("[!] Task 4 timed out after 61.0s (limit: 60s) - likely GPU hang or infinite loop", "timeout"),
        ("run gpu func warning: info:((256, 1, 2, 3), 2, 0, '')\t This GEMM is not supported!", "candidate"),
        ("run gpu func error: info:((256, 1, 2, 3), 2, 0, '')\t boom", "candidate"),
        ("tuning is not supported in this chip gfx942", "chip"),
        ("[aiter] tune result is none or all shape is tuned in /x.csv!", "nothing"),
        ("[aiter] error in batch 1 of 3: 'tile_m'", "error"),
        ("!Process killed by signal 6, retrying (1/30)", "retry"),
        ("!Error when run GemmTuner process exitcode is  134", "retry"),
        ("[aiter] [pid=9 pname=MainProcess] start build [module_x] under /jit/build/module_x", "jit_start"),
        ("[aiter] \033[32mfinish build [module_x], cost 100.1s \033[0m", "jit_end"),
        ("[aiter] \033[31mfailed jit build [module_x]\033[0m", "jit_failed"),
    ],
)
def test_kinds(line: str, kind: str) -> None:
    event = parse_line(line)
    assert event is not None
    assert event.kind == kind


def test_batches_that_are_in_the_files() -> None:
    batch = parse_line("[aiter] processed 2 batches of 4, Processing Status ====> 50.0% tuned in GemmTuner")
    assert batch is not None
    assert (batch.kind, batch.count) == ("batch", 2)


@pytest.mark.parametrize(
    "line", ["", "   ", "Totall tuning result:", "0 256  64  512", "[aiter] args: Namespace(batch=1)"]
)
def test_chatter_is_nothing(line: str) -> None:
    assert parse_line(line) is None


@pytest.mark.parametrize(
    "line",
    [
        "Tuning result for 'gfx': 'gfx950', 'cu_num': 256, 'M': 64, 'N': 576, 'K': 7168 is kernelId=3 x splitK=0, 1us",
        "Tuning result for 'cu_num': 256, 'M': np.int64(64), 'N': np.int64(576), 'K': np.int64(7168) is kernelId=3 x",
        "Tuning result for M:64, N:576, K:7168, cu_num:256 is kernelId=3 x splitK=0, 1us",
        "[aiter] No kernel can be used for (256, np.int64(64), 576, 7168)",
        "No kernel can be used for ((256, 64, 576, 7168), 3, 0, '')",
        "[aiter] error: no valid candidate found for ('gfx950', 256, 64, 576, 7168), please check the result",
        "(64, 576, 7168, False, 'torch.bfloat16', 'torch.bfloat16', False, False) >>> Fastest Solution is ",
    ],
)
def test_the_shape_of_a_line(line: str) -> None:
    event = parse_line(line)
    assert event is not None
    assert event.kind in ("tuned", "refused")
    assert KEYS.find(event.key, named=event.named) == 7


def test_a_key_that_is_none_of_ours() -> None:
    for text in ("(256, 65, 576, 7168)", "(256, 64)", "", "'M': 65, 'N': 576, 'K': 7168"):
        named, key = key_cells(text)
        assert KEYS.find(key, named=named) is None


def test_text_columns_of_a_key() -> None:
    columns = ("token", "model_dim", "act_type", "q_type", "doweight_stage1")
    ours: dict[str, int | str] = {
        "token": 16, "model_dim": 128, "act_type": "ActivationType.Silu", "q_type": "QuantType.per_128x128",
        "doweight_stage1": 0,
    }  # fmt: skip
    keys = ShapeKeys(columns, {1: ours, 2: {**ours, "token": 32}})
    for shown in ("ActivationType.Silu", "<ActivationType.Silu: 1>"):
        assert keys.find(("gfx950", "256", "16", "128", shown, "QuantType.per_1x128", "0"), named=False) == 1


def test_a_key_without_cu_num_is_no_other_shape_s() -> None:
    """Behind gfx alone: what follows M may be the M of another shape."""
    keys = ShapeKeys(("B", "M", "N", "K"), {1: dict(zip("BMNK", (16, 2, 1024, 4096), strict=True)),
                                            2: dict(zip("BMNK", (2, 1024, 4096, 128), strict=True))})  # fmt: skip
    assert keys.find(("gfx950", "16", "2", "1024", "4096"), named=False) == 1
    assert keys.find(("gfx950", "2", "1024", "4096", "128"), named=False) == 2


def test_lines_come_in_pieces() -> None:
    split = Splitter()
    assert split.feed(b"one\ntw") == ["one"]
    assert split.feed(b"o\r50%\rthree") == ["two", "50%"]
    assert split.feed(b"\n") == ["three"]
    assert len(split.feed(b"x" * 70_000)) == 1
