"""pandas as it was in 2025: an axis beside `columns` was not looked at, which pandas 3 refuses."""

from __future__ import annotations

from typing import Any


def after(module: Any) -> None:
    inner = module.DataFrame.drop

    def drop(self: Any, labels: Any = None, *, columns: Any = None, axis: Any = 0, **more: Any) -> Any:
        return inner(self, labels, axis=axis, **more) if columns is None else inner(self, columns=columns, **more)

    module.DataFrame.drop = drop
