"""The three task families on real records, on a CPU."""
