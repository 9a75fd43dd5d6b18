"""`harness drill`: faults done to short runs of a user's config, and what became of each."""
