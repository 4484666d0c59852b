"""BFCL v4 multi-turn function calling: users who ask for several things in a row, and simulated services to call."""
