"""`python -m benchmarks.proof`: what a card really does with this project, in under a quarter of an hour."""
