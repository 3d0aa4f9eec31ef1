"""`python -m worker.bench.once SPEC.json`: one backend on one shape, a number of calls, for a profiler that watches."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from worker.bench.child import Child, inference
from worker.bench.options import Options


def main(spec: Path) -> int:
    """The answer goes into `answer.json` beside the spec; exit status 0 where the calls were made."""
    asked = json.loads(spec.read_text())
    child = Child(asked["backend"], Options.parse(asked["options"]), lambda message: None)
    answer: dict[str, Any] = child.start()
    if answer["is"] == "ready":
        with inference():
            for command in asked["commands"]:
                answer = child.obey(command)
                if answer["is"] == "refused":
                    break
    spec.with_name("answer.json").write_text(json.dumps(answer, default=str))
    return 0 if answer["is"] == "called" else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
