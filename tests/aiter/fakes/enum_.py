"""The enums that dtypes need."""

import enum


class QuantType(enum.Enum):
    No = 0
    per_1x32 = 4


class ActivationType(enum.Enum):
    No = -1
    Silu = 0
