"""`python -m orchestrator` is `gemmfleet`."""

from orchestrator.cli.main import main

if __name__ == "__main__":
    main()
