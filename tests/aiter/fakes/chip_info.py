"""The chip."""


def get_gfx() -> str:
    return "gfx950"


get_gfx_runtime = get_gfx


def get_cu_num() -> int:
    return 256
