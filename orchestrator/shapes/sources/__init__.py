"""Shape lists made from a model's config.json, from AITER's logs, or from a run of a workload.

What each writes is read by `tune` as it is (docs/how-to/shape-lists.md).
"""
