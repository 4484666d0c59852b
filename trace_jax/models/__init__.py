"""Neural networks: the decoder, the predictor. The only package that imports flax.linen."""
