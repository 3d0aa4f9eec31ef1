"""AITER's Triton config files changed by runs: winners read, merged with proof, undone, checked."""
