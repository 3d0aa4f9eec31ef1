"""The command line and environment of AITER's processes, from facts of the script."""

from __future__ import annotations

from pathlib import Path

import pytest

from worker.families import FAMILIES
from worker.tuners.aiter.findings import TunerScript
from worker.tuners.aiter.launch import aiter_timeout, argv, batch_size, ignored_options
from worker.tuners.aiter.spec import Options, tuner_arg_flags

BARE = {"--untune_file": "value", "--tune_file": "value", "--mp": "value", "--splitK": "flag", "--errRatio": "value"}
BASE = {**BARE, "--profile_file": "value", "--batch": "value", "--verbose": "flag", "--all": "flag", "--sort": "flag"}
NEWEST = {
    **BASE,
    "--timeout": "value",
    "--warmup": "value",
    "--iters": "value",
    "--libtype": "value",
    "--sort": "value",
    "--run_config": "value",
}
FILES = Path("/f")
A4W4 = FAMILIES["a4w4_blockscale"]


def facts(flags: dict[str, str]) -> TunerScript:
    return TunerScript(Path("/t/tune.py"), flags, ("M", "N", "K"))


@pytest.mark.parametrize(("flags", "batch"), [(BASE, 1), (NEWEST, 4)])
def test_a_version_with_the_topk_fault_gets_one_shape_a_batch(flags: dict[str, str], batch: int) -> None:
    assert batch_size(A4W4, facts(flags), Options()) == batch
    assert batch_size(A4W4, facts(flags), Options(batch=3)) == 3
    assert ignored_options(facts(flags), Options()) == []


def test_a_family_that_may_have_no_candidate_is_never_batched_unasked() -> None:
    assert batch_size(FAMILIES["a8w8_blockscale"], facts(NEWEST), Options()) == 1
    assert batch_size(FAMILIES["a8w8_blockscale"], facts(NEWEST), Options(batch=9)) == 9


def test_what_is_ignored_is_said() -> None:
    options = Options(warmup=7, iters=9, batch=3, split_k=True, tuner_timeout=50, tuner_args=("--libtype", "asm"))
    notes = ignored_options(facts(BARE), options)
    ignored = {note.partition(" is ignored: tune.py of this image has no ")[0] for note in notes if "ignored" in note}
    assert ignored == {"--warmup", "--iters", "--batch", "--tuner-arg --libtype"}
    assert notes[-1] == "--tuner-timeout is kept by gemmfleet alone: tune.py of this image has no --timeout"


def test_further_words() -> None:
    options = Options(tuner_args=("--libtype=asm", "--nonsense", "1"))
    assert argv(A4W4, facts(NEWEST), options, FILES, batch=1, err_ratio=0.05)[-2:] == ["--libtype", "asm"]
    for bad in (("-o", "x"), ("--tune_file=/etc/x",), ("--all",), ("asm",), ("-z",), ("--compare",)):
        with pytest.raises(ValueError, match="--tuner-arg"):
            tuner_arg_flags(bad)
    with pytest.raises(ValueError, match=r"--grouped-gemm: it tunes AITER's tuned_grouped_fmoe\.csv"):
        tuner_arg_flags(("--grouped-gemm",))
    with pytest.raises(ValueError, match="--mxfp4-flydsl: it measures pairs of kernels"):
        tuner_arg_flags(("--mxfp4-flydsl",))
    with pytest.raises(ValueError, match="--apply is gemmfleet's to set"):
        tuner_arg_flags(("--apply",))
    tuner_arg_flags(("--blockPerCu", "1", "2", "-3"))


def test_our_limit_comes_before_aiters() -> None:
    assert aiter_timeout(Options(tuner_timeout=100), 1) > 100
    assert aiter_timeout(Options(tuner_timeout=100), 4) > 400, "it counts from the start of the batch until 2026-08"
    assert aiter_timeout(Options(), 1) > 24 * 3600


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="unknown option 'wramup'"):
        Options.parse({"wramup": 1})
    with pytest.raises(ValueError, match=r"warmup is -1.*; split_k is 1"):
        Options.parse({"warmup": -1, "split_k": 1})
    assert Options.parse({"tuner_args": ["--a", "b"]}).tuner_args == ("--a", "b")
