"""Lints of a model: what costs speed or ends in NaN, found by tracing one forward. See `model.lint_model`."""
