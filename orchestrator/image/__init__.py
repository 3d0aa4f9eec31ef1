"""Images with AITER at a ref on the user's base: rendered, and built here or on a node (docs/how-to/new-aiter.md)."""
