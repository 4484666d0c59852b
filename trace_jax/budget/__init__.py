"""Where the rollout budget is spent: exact allocators, strategies and accounts. Pure numpy."""
