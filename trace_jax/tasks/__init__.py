"""Task families: prompts, tools, environments as values, rewards and scripted demonstrations."""
