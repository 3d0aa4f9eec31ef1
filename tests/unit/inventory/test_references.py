"""References to the environment: found anywhere, resolved only where needed, missing ones named with their place."""

from __future__ import annotations

import re

import pytest

from orchestrator.inventory import values as references

DATA = {
    "host": "${env:HOST}.example.com",
    "port": 22,
    "env": {"A": "${env:X}-${env:Y}-${env:X}", "B": "plain $HOME ${HOME} $$"},
    "docker": {"volumes": ("/a:/b", "${env:DATA}:/data"), "shm_size": None},
}


def origin(path: str) -> str:
    return f"inv.yaml:{len(path)}"


def test_everything_is_resolved_and_nothing_else_changes() -> None:
    env = {"HOST": "n1", "X": "1", "Y": "${env:X}", "DATA": "/mnt"}
    out = references.resolve(DATA, "n", origin, env)
    assert out["host"] == "n1.example.com"
    assert out["env"] == {"A": "1-${env:X}-1", "B": "plain $HOME ${HOME} $$"}  # a value is not resolved again
    assert out["docker"] == {"volumes": ("/a:/b", "/mnt:/data"), "shm_size": None}
    assert out["port"] == 22
    assert DATA["host"] == "${env:HOST}.example.com"


@pytest.mark.parametrize("text", ["${env:}", "${env:1A}", "${env:A-B}", "${env:A", "${ env:A}", "${env A}", "${env}"])
def test_what_only_looks_like_a_reference_is_said(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape("a reference is written ${env:NAME}")):
        references.masked(f"x {text} y")
