"""Rollout trees in numpy: growing, reading, credit, token weights, packing and metrics."""
