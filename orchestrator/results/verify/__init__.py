"""Proof that AITER uses tuned rows and that they still compute right (docs/using-results.md)."""
