"""What the fork server imports once for all that it forks; nothing here touches a GPU."""

from __future__ import annotations

import contextlib

with contextlib.suppress(ImportError):  # a process that needs them says what is missing
    import worker.tuners.triton.launch
    import worker.tuners.triton.operands  # noqa: F401
