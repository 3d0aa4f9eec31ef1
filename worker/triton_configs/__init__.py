"""AITER's JSON configs of its Triton GEMMs: their kinds, the one that a shape gets, their text."""
