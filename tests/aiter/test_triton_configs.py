"""Our reading of `get_gemm_config` held to the real function on every shipped config file, layout by layout."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from orchestrator.configs.aiter_trial import LoaderArguments, run_trial
from orchestrator.configs.check import chips_of
from tests.aiter.checkout import needs_checkout, take_out
from worker.triton_configs.resolve import ResolveError, Resolver
from worker.triton_configs.tree_files import list_files

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


def calls_of(resolver: Resolver) -> list[tuple[LoaderArguments, object]]:
    """Calls at and around every bound for the shapes of all files and one of none, each with our answer."""
    out: list[tuple[LoaderArguments, object]] = []
    kinds: dict[str, set[tuple[int | None, int, int]]] = {}
    files = [f for f in list_files(resolver)[0] if not f.kind.custom_suffix]
    for file in files:
        kinds.setdefault(file.kind.name, {(7, 48, 80)}).update([file.sizes] if file.sizes else [])
    for kind in {f.kind.name: f.kind for f in files}.values():
        bounds = resolver.bounds(kind)
        backend = kind.backend if resolver.loader.knows_backend else None
        for b, n, k in sorted(kinds[kind.name], key=str):
            b = b if resolver.loader.knows_batch and kind.batch_in_name else None
            for m in sorted({m for x in bounds for m in (x - 1, x, x + 1) if m}):
                try:
                    values: object = resolver.config_for(kind, m, n, k, b).values
                except ResolveError:
                    values = None
                sizes = {"M": m, "N": n, "K": k, "B": b}
                out.append(({"config_name": kind.config, **sizes, "bounds": bounds, "backend": backend}, values))
    return out


@pytest.mark.parametrize("commit", LAYOUTS)
def test_the_resolver_gives_what_the_real_function_gives(commit: str, tmp_path: Path) -> None:
    take_out(commit, tmp_path, "aiter/ops/triton")
    asked = 0
    for gfx in chips_of(tmp_path):
        resolver = Resolver(tmp_path, gfx)
        assert (resolver.loader.layout, resolver.loader.knows_backend, resolver.loader.knows_batch) == LAYOUTS[commit]
        calls = calls_of(resolver)
        trial = run_trial(tmp_path, gfx, [c for c, _ in calls], alone=True)
        assert not trial.why_not
        wrong = [(c, ours, theirs) for (c, ours), theirs in zip(calls, trial.answers, strict=True) if ours != theirs]
        assert not wrong, wrong[:3]
        asked += len(calls)
    assert asked > 1000
