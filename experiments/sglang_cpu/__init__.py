"""Rollouts on real SGLang servers that compute on this machine's CPU."""
