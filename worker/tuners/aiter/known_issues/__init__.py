"""Known issues of AITER's tuners, as data.

A new one takes three steps: a `KnownIssue` in `execution` or `environment`, before the issues that follow from it, with
a line of real output as `example`; its sources, compared with a clone by `make test-aiter AITER_GIT=PATH`; the page
printed again by `python -m worker.tuners.aiter.known_issues.catalogue --markdown`.
"""
