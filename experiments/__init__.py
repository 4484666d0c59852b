"""Experiments: one folder per table or figure, each with its command, raw metrics and results."""
