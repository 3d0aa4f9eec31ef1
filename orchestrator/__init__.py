"""The controller: plans, deploys, dispatches, records and judges. Runs anywhere; needs no GPU."""

__version__ = "0.3.0"
