"""`python -m benchmarks.proof`: measures what a card does with this project, in under half an hour."""
