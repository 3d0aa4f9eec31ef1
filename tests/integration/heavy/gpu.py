"""A GPU of a node as its kernel would show it: files of our own making, for all that comes in by SSH."""

from __future__ import annotations

from tests.integration.heavy.node import HeavyNode

ROOT = "/run/sys"
_TOPOLOGY, _DEVICE = f"{ROOT}/class/kfd/kfd/topology/nodes/1", f"{ROOT}/class/drm/renderD128/device"


def a_gpu(node: HeavyNode, **files: str) -> None:
    """One MI355X; `files` of its device folder, on top of an idle GPU."""
    properties = (
        "simd_count 1024\\nsimd_per_cu 4\\ngfx_target_version 90500\\nlocation_id 1280\\ndrm_render_minor 128\\n"
    )
    node.sh(
        f"mkdir -p {_TOPOLOGY} {_DEVICE} && printf '{properties}' >{_TOPOLOGY}/properties && echo 7 >{_TOPOLOGY}/gpu_id"
        f" && echo 0x1002 >{_DEVICE}/vendor"
    )
    gpu_says(node, gpu_busy_percent="0", **files)
    node.set_sshd_options(f"SetEnv GEMMFLEET_SYS={ROOT}")


def gpu_says(node: HeavyNode, **files: str) -> None:
    """Files of the device folder from now on; `__` in a name stands for `/`."""
    for name, text in files.items():
        path = f"{_DEVICE}/{name.replace('__', '/')}"
        node.sh(f"mkdir -p $(dirname {path}) && printf '{text}\\n' >{path}")
    node.sh(f"chmod -R a+rX {ROOT}")
