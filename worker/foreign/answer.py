"""The command of `runner.call`: reads a call on standard input, makes it, and writes the answer as JSON.

`enter.py` starts it as `python answer.py ANSWER_FD`. The call is `{"module": "orchestrator.configs.check", "name":
"compile_buckets", "arguments": [...], "root": "/where/gemmfleet/is", "path": [...]}`, the answer `{"value": ...}` or
`{"error": "KeyError", "text": "..."}`. What the code under it prints goes to standard error.
"""

import importlib
import json
import os
import sys
from typing import Any


def main() -> None:
    asked = json.load(sys.stdin)
    sys.path[:] = [asked["root"], *(asked["path"] or sys.path)]
    from worker.foreign.values import decode_arguments, encode

    function = getattr(importlib.import_module(asked["module"]), asked["name"])
    if not asked["path"]:
        sys.path.remove(asked["root"])  # it may be a site-packages
    answer: dict[str, Any]
    try:
        answer = {"value": encode(function(*decode_arguments(function, asked["arguments"])))}
    except BaseException as e:  # noqa: BLE001 - whatever the foreign code raises, SystemExit too
        answer = {"error": type(e).__name__, "text": str(e)}
    with open(int(sys.argv[1]), "w", closefd=False) as out:
        json.dump(answer, out)
    sys.stderr.flush()
    os._exit(0)  # exit handlers of the foreign code are not run


if __name__ == "__main__":
    main()
