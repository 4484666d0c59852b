"""What samples tokens: one protocol, several engines."""
