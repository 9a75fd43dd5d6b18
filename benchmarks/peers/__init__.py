"""Trains one model in the loops of several libraries, in turns: docs/studies/peers.md."""
