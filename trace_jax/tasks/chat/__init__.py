"""Chat formats: prompts with tools, turns with calls, and any chat family as a task."""
