"""`python -m benchmarks.proof`: what a card really does with this project, row by row, in under a quarter of an hour."""
