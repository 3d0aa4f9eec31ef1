"""Results analyzed: backends against each other, two stacks against each other."""
