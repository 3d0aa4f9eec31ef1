"""Proof that AITER uses tuned rows and that they still compute right (docs/how-to/table-to-production.md)."""
