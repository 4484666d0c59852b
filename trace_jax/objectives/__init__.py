"""Losses and scores of arrays: no model, no config, no tree."""
