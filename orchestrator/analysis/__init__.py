"""What the results say: backends, comparison of two stacks, the report."""
