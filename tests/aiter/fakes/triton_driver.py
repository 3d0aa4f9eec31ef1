"""The chip as Triton sees it. Its kernels are not run: where AITER launches one, it gets an error, as for no kernel."""

from __future__ import annotations

from typing import Any


class _Driver:
    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("hip", "gfx950", 64)

    def get_current_device(self) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"multiprocessor_count": 256, "max_shared_mem": 160 << 10, "warpSize": 64}

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no Triton kernel runs here ({name})")


def after(module: Any) -> None:
    module.driver.set_active(_Driver())
