"""Results read, compared and shown: profiles, backends, verdicts, the page."""
