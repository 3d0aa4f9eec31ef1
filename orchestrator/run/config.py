"""Configuration of a run (run.yaml), and the folder of a new one."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from orchestrator.errors import InputError
from orchestrator.paths import RunPaths


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Configuration of a run as requested. The inventory lies beside it unchanged, references unresolved."""

    run: str
    created: float
    argv: list[str]
    version: str
    family: str
    tuner: str
    shapes: str
    shapes_sha256: str
    inventory: str
    limit: str | None = None
    db: str | None = None
    retune: bool = False
    watchdog_s: float = 300.0
    grace_s: float = 30.0
    err_ratio: float = 0.05
    options: dict[str, Any] = field(default_factory=dict)
    accept_new_host_keys: bool = False
    lost_after_s: float = 90.0
    busy: str | None = None
    """Treatment of an occupied node: wait, skip, share; None: as in the inventory."""

    def write(self, path: Path) -> None:
        import yaml

        path.write_text(yaml.safe_dump(asdict(self), sort_keys=False, allow_unicode=True))

    @classmethod
    def read(cls, path: Path) -> RunConfig:
        import yaml

        try:
            raw = yaml.safe_load(path.read_text())
            known = {f.name for f in fields(cls)}
            return cls(**{k: v for k, v in raw.items() if k in known})
        except FileNotFoundError:
            raise InputError(f"{path} is missing: this is no run folder") from None
        except (OSError, TypeError, AttributeError, UnicodeDecodeError, yaml.YAMLError) as e:
            raise InputError(f"{path} cannot be read: {e}") from e


def create_run_folder(runs: Path, run: str) -> RunPaths:
    """Create a run folder, 0700. Raise InputError where that fails."""
    paths = RunPaths(runs / run)
    try:
        runs.mkdir(parents=True, exist_ok=True)
        os.mkdir(paths.root, 0o700)
        for folder in paths.folders()[1:]:
            folder.mkdir(mode=0o700)
    except OSError as e:
        raise InputError(
            f"cannot make the run folder {paths.root}: {e.strerror}; choose another place with --runs DIR"
        ) from e
    return paths
