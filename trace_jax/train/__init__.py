"""Jitted updates of the policy and the predictor, their state, checkpoints and metrics."""
