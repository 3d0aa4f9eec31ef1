"""A folder that is put on the PYTHONPATH of AITER's processes; nothing of the worker imports it."""
