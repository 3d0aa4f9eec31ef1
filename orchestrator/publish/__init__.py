"""Winners as a branch of a local checkout of AITER, with the evidence that a review needs. Nothing is ever pushed."""
