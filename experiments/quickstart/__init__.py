"""GRPO against TRACE on the small tasks."""
