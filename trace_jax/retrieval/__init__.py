"""Search in passages: a BM25 or dense index, served over HTTP, and the client of such a server."""
