"""Imported before torch: puts the fake card of `harness estimate` into the process, once and for all its forks."""

from harness.estimate import device

device.load()
