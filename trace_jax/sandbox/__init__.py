"""Runs untrusted Python: a pool of interpreters that end with each call, an HTTP service, and its client."""
