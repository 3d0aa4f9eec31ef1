"""`shapes check` as a user sees it, and the examples of docs/how-to/shape-lists.md."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.errors import InputError
from tests.paths import ROOT


def check(*args: str) -> tuple[str, InputError | None]:
    """Standard output of `shapes check`, and the error that main would print."""
    result = CliRunner().invoke(app, ["shapes", "check", *args])
    error = result.exception
    assert error is None or isinstance(error, InputError)
    assert result.stderr == ""
    return result.stdout, error


def test_good_list() -> None:
    out, error = check(str(ROOT / "examples" / "fp4_suite.csv"), "--family", "a4w4_blockscale")
    assert error is None
    assert "  4 shapes (4480x54400x36224, " in out.splitlines()[1]
    assert out.splitlines()[2:] == ["  shapes: 15", "  groups: 11 (same key columns but M)", "  M: 4480 to 65536"]


def test_json(tmp_path: Path) -> None:
    path = tmp_path / "s.csv"
    path.write_text("token,model_dim,inter_dim,expert,topk\n7,2,3,4,5\n")
    out, error = check(str(path), "--family", "fmoe", "--json")
    assert error is None
    found = json.loads(out)
    assert (found["ok"], found["shapes"], found["groups"]) == (True, 1, 1)
    assert found["m"] == {"column": "token", "min": 7, "max": 7}
    assert "q_type = QuantType.per_Token" in found["notes"][0]


def test_json_of_a_bad_list(tmp_path: Path) -> None:
    for args in (("--family", "a16w16"), ("--family", "a16w17")):
        out, error = check(str(tmp_path / "none.csv"), *args, "--json")
        assert error is not None
        assert error.exit_code == 2
        assert json.loads(out)["faults"] == error.faults


def test_examples_of_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "docs" / "how-to" / "shape-lists.md").read_text(), re.DOTALL)
    assert [kind for kind, _ in blocks] == ["csv", "text", "csv", "text"]
    good = "\ufeffM,N,K\r\n1, 28672, 4096\r\n16,28672,4096\r\n\r\n16,28672,4096\r\n32,4096,14336\r\n"
    Path("llm.csv").write_bytes(good.encode())
    assert check("llm.csv") == (blocks[1][1], None)
    Path("broken.csv").write_text(blocks[2][1])
    _, error = check("broken.csv")
    assert error is not None
    assert "".join(f"error: {f}\n" for f in error.faults) == blocks[3][1]
