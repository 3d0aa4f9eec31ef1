"""Views of a run for people: status, live view, explanations and parts of the page, read from its state."""
