"""Where shape lists come from beside a person's editor: a model's config.json, AITER's logs, a run of a workload.

What each writes is read by `tune` as it is (docs/how-to/shape-lists.md).
"""
