"""Profiles of a few steps of a run: a trace for Perfetto, and a table of what the steps' time went to."""
