"""What a decoder looks like. Plain frozen dataclasses; no jax."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """RoPE frequency scaling of Llama 3.1 and later (`rope_type: llama3` of a Hugging Face config)."""

    factor: float = 8.0  # low frequencies are divided by this
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """One decoder for three families of checkpoints.

    Qwen3: `qk_norm=True, qkv_bias=False`. Qwen2/2.5: `qk_norm=False, qkv_bias=True`.
    Llama: both False, and from 3.1 on `rope_scaling=Llama3Scaling(...)`.
    The last block of fields says how the same function is computed; it changes no more than rounding.
    """

    vocab_size: int
    hidden_size: int  # D
    num_layers: int
    num_heads: int  # N query heads
    num_kv_heads: int  # K key and value heads; N % K == 0
    head_dim: int  # H, even; independent of D / N
    mlp_size: int  # F
    rope_theta: float = 1e6
    rope_scaling: Llama3Scaling | None = None
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = True
    qk_norm: bool = True  # RMSNorm over head_dim on queries and keys, before RoPE
    qkv_bias: bool = False
    o_bias: bool = False  # of the attention's output projection
    max_positions: int = 4096  # tokens of context
    sampled_vocab: int | None = None  # ids from here on are padding of the vocabulary and have no logits; None: all do

    scan_layers: bool = False  # lax.scan over stacked layers: compiles a deep model once; slower on a CPU
    remat: bool = False  # recompute each layer in the backward pass
    fuse_projections: bool = False  # one kernel for q, k, v and one for gate, up
    dtype: str = "float32"  # activations; norms and softmax are float32 always
    param_dtype: str = "float32"  # parameters; below float32 only where they are frozen

    def validate(self) -> DecoderConfig:
        """Raises ValueError for a shape that cannot be built."""
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "mlp_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"model: {name} is {getattr(self, name)}, must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"model: num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"model: head_dim {self.head_dim} is odd; RoPE rotates pairs")
        return self
