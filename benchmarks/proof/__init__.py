"""`python -m benchmarks.proof`: measures what a card does with this project, in under a quarter of an hour."""
