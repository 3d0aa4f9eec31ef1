"""A family that the tuner does not tune is an error before anything is read or started."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.errors import InputError
from orchestrator.families import check_family, get_tuner
from worker.families import FAMILIES
from worker.tuners.aiter_triton.spec import Options, kind_of


@pytest.mark.parametrize("more", [[], ["--plan"]])
def test_tune_names_the_families_once(tmp_path: Path, more: list[str]) -> None:
    shapes = tmp_path / "s.csv"
    shapes.write_text("M,N,K\n16,64,64\n32,64,64\n")
    asked = ["tune", str(shapes), "--tuner", "torch", "--family", "a8w8_blockscale", "--runs", str(tmp_path / "runs")]
    done = CliRunner().invoke(app, [*asked, *more])
    assert isinstance(done.exception, InputError)
    assert done.exception.faults == [
        "the tuner torch does not tune family a8w8_blockscale; it tunes a16w16, a8w8, a4w4_blockscale"
    ]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("family", FAMILIES)
def test_aiter_triton_tunes_the_families_that_have_a_kind(family: str) -> None:
    spec = get_tuner("aiter-triton")
    try:
        kind_of(Options.parse({"family": family}))
    except ValueError:
        with pytest.raises(InputError, match=f"does not tune family {family}; it tunes a16w16, a8w8, "):
            check_family(spec, family, {})
    else:
        check_family(spec, family, {})
    check_family(spec, family, {"kind": "a4w4_preshuffle"})
    check_family(get_tuner("aiter"), family, {})
