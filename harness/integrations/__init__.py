"""Thin adapters for other trainers, on harness.Precision, harness.Guard and harness.Telemetry alone."""
