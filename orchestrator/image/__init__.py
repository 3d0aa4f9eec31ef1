"""Images with AITER at a ref on the user's own base: rendered, and built here or on a node (docs/image.md)."""
