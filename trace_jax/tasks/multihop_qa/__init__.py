"""Multi-hop questions that are answered with a search tool."""
