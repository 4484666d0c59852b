"""TRACE: Tree Rollout Allocation for Contrastive Exploration, in JAX."""
