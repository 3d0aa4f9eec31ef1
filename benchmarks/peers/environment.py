"""An environment of their own for the peers, made with pip."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
INSTALL_S = 600.0


@dataclass(frozen=True)
class Environment:
    """`versions` of the peers that are installed; `missing`: reason for each that is not. By package."""

    folder: Path
    versions: dict[str, str]
    missing: dict[str, str]

    def program(self, name: str) -> str:
        return str(self.folder / "bin" / name)


def requirements(text: str) -> dict[str, str]:
    """Requirements by package: the lines of a requirements file without comments."""
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return {re.split(r"[<>=~!\[; ]", line, maxsplit=1)[0]: line for line in lines if line}


def last_error(output: str) -> str:
    """Last line that names an error, else the last line; for a table's cell."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"error|fatal|refused|denied", line, re.IGNORECASE)]
    return (errors or lines or ["no output"])[-1].replace("|", "/")[:160]


def make(folder: Path) -> Environment:
    """Make the environment, or complete one that is there. A peer that cannot be installed is missing, with the reason
    that pip gives."""
    if not (folder / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    wanted = requirements(REQUIREMENTS.read_text())
    missing = {}
    for package, line in wanted.items():
        done = _pip(folder, "install", "--quiet", "--prefer-binary", line)
        if done.returncode:
            missing[package] = f"not installed: {last_error(done.stderr)}"
    listed = json.loads(_pip(folder, "list", "--format", "json").stdout)
    return Environment(folder, versions(listed, wanted.keys() - missing.keys()), missing)


def versions(listed: Iterable[dict[str, str]], packages: Iterable[str]) -> dict[str, str]:
    """Versions of `packages` in what `pip list --format json` prints."""
    found = {entry["name"].lower().replace("_", "-"): entry["version"] for entry in listed}
    return {name: found[name] for name in packages if name in found}


def _pip(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", *words]
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=INSTALL_S)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(argv, 1, "[]", f"error: pip was not done in {INSTALL_S:g} s")
