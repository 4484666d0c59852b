"""How good the success predictor is, and what makes it so."""
