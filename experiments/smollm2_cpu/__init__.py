"""SmolLM2-135M on CPU cores: speed and training."""
