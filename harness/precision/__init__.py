"""Precision: recipe, plan, delayed scaling, backends, per-layer fallback. Import the submodule you need."""
