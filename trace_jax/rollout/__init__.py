"""Multi-turn episodes over tokens, and the two-stage collection of rollout trees."""
