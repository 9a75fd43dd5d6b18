"""`harness rehearse`: the same steps in every precision, before a run, or from just before it broke."""
