"""SGLang servers of this machine: their command lines, their processes, the environment of the CPU test server."""
