"""Our reading of `get_gemm_config` held to the real function on every shipped config file, layout by layout."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

from orchestrator.configs.aiter import AiterTree, Call, run_trial
from orchestrator.configs.check import chips_of, lint
from tests.aiter.checkout import needs_checkout, take_out
from worker.triton_configs.kinds import BY_NAME
from worker.triton_configs.resolve import ResolveError, Resolver, shipped
from worker.tuners.aiter_triton.spec import tuned_kinds

pytestmark = [needs_checkout, pytest.mark.skipif(not find_spec("triton"), reason="there is no Triton")]
NEWEST = "e4048607a5"
LAYOUTS = {
    "e6f3ee8511": ("flat", False, False),  # 2025-12-20, the first
    "7e0d116264": ("flat", True, False),  # 2026-07-06, folders of backends
    "61d34aeed3": ("flat", True, True),  # 2026-07-12, files with B
    "9312ef7c01": ("nested", True, True),  # 2026-07-27
    "c4851f9c3b": ("folders", True, True),  # 2026-08-10
    NEWEST: ("folders", True, True),
}


def calls_of(resolver: Resolver) -> list[tuple[Call, object]]:
    """Calls at and around every bound for the shapes of all files and one of none, each with our answer."""
    out: list[tuple[Call, object]] = []
    kinds: dict[str, set[tuple[int | None, int, int]]] = {}
    files = [f for f in shipped(resolver)[0] if not f.kind.custom_suffix]
    for file in files:
        kinds.setdefault(file.kind.name, {(7, 48, 80)}).update([file.named] if file.named else [])
    for kind in {f.kind.name: f.kind for f in files}.values():
        bounds = resolver.bounds(kind)
        backend = kind.backend if resolver.loader.backend else None
        for b, n, k in sorted(kinds[kind.name], key=str):
            b = b if resolver.loader.batch and kind.batch_in_name else None
            for m in sorted({m for x in bounds for m in (x - 1, x, x + 1) if m}):
                try:
                    values: object = resolver.config_for(kind, m, n, k, b).values
                except ResolveError:
                    values = None
                out.append((Call(kind.config, m, n, k, bounds, backend, b), values))
    return out


@pytest.mark.parametrize("commit", LAYOUTS)
def test_the_resolver_gives_what_the_real_function_gives(commit: str, tmp_path: Path) -> None:
    take_out(commit, tmp_path, "aiter/ops/triton")
    asked = 0
    for gfx in chips_of(tmp_path):
        resolver = Resolver(tmp_path, gfx)
        assert (resolver.loader.layout, resolver.loader.backend, resolver.loader.batch) == LAYOUTS[commit]
        calls = calls_of(resolver)
        trial = run_trial(tmp_path, gfx, [c for c, _ in calls], alone=True)
        assert not trial.why_not
        wrong = [(c, ours, theirs) for (c, ours), theirs in zip(calls, trial.answers, strict=True) if ours != theirs]
        assert not wrong, wrong[:3]
        asked += len(calls)
    assert asked > 1000


def test_the_operators_that_read_a_tuned_kinds_files(tmp_path: Path) -> None:
    take_out(NEWEST, tmp_path, "aiter/ops/triton")
    found = {name: AiterTree(tmp_path, "gfx950").operators(BY_NAME[name]) for name in tuned_kinds()}
    assert {name: of for name, of in found.items() if of} == {
        "a16w16": {"fused_gemm_a16w16_quant_x": True},
        "a8w8_blockscale": {
            "fused_gemm_a8w8_blockscale_mul_add": True, "fused_gemm_a8w8_blockscale_split_cat": False,
        },
        "a8w8_blockscale_bpreshuffle": {"fused_gemm_a8w8_blockscale_split_cat": False},
        "a4w4": {"gemm_afp4wfp4_preshuffled_scales": False, "fused_gemm_afp4wfp4_split_cat": False},
        "a4w4_preshuffle": {
            "fused_gemm_afp4wfp4_preshuffle_add_mul": True, "fused_gemm_afp4wfp4_split_cat": False,
        },
        "batched_a16w4": {"fusions.fused_bmm_rope_kv_cache": False},
        "batched_a8w8_prequant": {"fusions.fused_bmm_rope_kv_cache": False},
    }  # fmt: skip


def test_faults_of_the_shipped_files(tmp_path: Path) -> None:
    take_out(NEWEST, tmp_path, "aiter/ops/triton")
    found = {gfx: lint(Resolver(tmp_path, gfx)) for gfx in ("gfx942", "gfx950", "gfx1250")}
    errors = {gfx: Counter(f.rule for f in some if f.level == "error") for gfx, some in found.items()}
    assert errors == {"gfx942": {}, "gfx950": {"unreachable": 3}, "gfx1250": {"kpack": 30}}
    assert {(Path(f.path).name, f.bucket) for f in found["gfx950"] if f.level == "error"} == {
        ("gfx950-GEMM-A16W16-gated.json", f"M_LEQ_{x}") for x in (8, 16, 32)
    }
    assert sum(f.rule == "outlier" for f in found["gfx950"]) == 35
