"""What runs in a backend's own process and needs torch; the rest of worker/bench needs the standard library only."""
