"""Installs a package of ours or of the examples into a folder, as pip would, without pip and without network."""

from __future__ import annotations

import shutil
from pathlib import Path

import tomllib


def install(project: Path, site: Path) -> Path:
    """Copy the packages of a project into `site`, with its entry points; returns `site`."""
    described = tomllib.loads((project / "pyproject.toml").read_text())
    name, version = described["project"]["name"], described["project"]["version"]
    for package in described["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
        shutil.copytree(project / package, site / package, ignore=shutil.ignore_patterns("__pycache__"))
    facts = site / f"{name.replace('-', '_')}-{version}.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for group, points in described["project"]["entry-points"].items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in points.items())]
    (facts / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return site
