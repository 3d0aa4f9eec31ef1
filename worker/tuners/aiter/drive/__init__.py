"""AITER on a slot: processes, their environment and files, and what becomes of shapes and candidates."""
