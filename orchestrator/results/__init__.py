"""What a run leaves behind: the tuned table, the profile, the failures, where it all comes from (docs/files.md)."""
