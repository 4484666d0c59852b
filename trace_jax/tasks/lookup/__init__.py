"""Multi-hop questions over a generated knowledge base, answered through a search tool."""
