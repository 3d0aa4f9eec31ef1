"""AITER's own Triton GEMMs tuned: the configs that its JSON files hold, per bucket of M."""
