"""What people see of a run: status, live view, explanations and the page's parts, read from its state."""
