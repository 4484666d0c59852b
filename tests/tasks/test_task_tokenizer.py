import json

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from hypothesis import given
from hypothesis import strategies as st

from trace_jax.tasks import tokenizer as tokenizers

CHARACTERS = tokenizers.build_tokenizer([*"0123456789+=\n"], word_level=False)
WORD_LIST = ["search", "mara", "novak", ";", "\n"]
WORDS = tokenizers.build_tokenizer(WORD_LIST, word_level=True)


def test_ids_are_padding_unknown_then_the_symbols_in_order():
    assert (CHARACTERS.pad_token_id, CHARACTERS.unk_token_id, len(CHARACTERS)) == (0, 1, 15)
    assert tokenizers.encode(CHARACTERS, "0123456789+=\n").tolist() == list(range(2, 15))
    assert tokenizers.encode(WORDS, "search mara novak ;\n").tolist() == [2, 3, 4, 5, 6]
    assert tokenizers.encode(WORDS, "").dtype == np.int32


@given(st.text(alphabet="0123456789+=\n", max_size=40))
def test_characters_round_trip(text):
    tokens = tokenizers.encode(CHARACTERS, text)
    assert len(tokens) == len(text)
    assert tokenizers.decode(CHARACTERS, tokens) == text


@given(st.lists(st.lists(st.sampled_from(WORD_LIST[:-1]), max_size=6), max_size=5))
def test_words_round_trip_and_lines_are_tokenised_apart(lines):
    text = "".join(" ".join(line) + "\n" for line in lines)
    tokens = tokenizers.encode(WORDS, text)
    assert tokens.tolist() == [2 + WORD_LIST.index(word) for line in lines for word in (*line, "\n")]
    assert tokenizers.decode(WORDS, tokens) == text
    each = [tokenizers.encode(WORDS, " ".join(line) + "\n") for line in lines]
    assert np.array_equal(tokens, np.concatenate([*each, np.zeros(0, np.int32)]))


@given(st.text(alphabet=st.characters(), max_size=60))  # lone surrogates too
def test_any_text_can_be_encoded_and_never_makes_padding(text):
    for tokenizer in (CHARACTERS, WORDS):
        tokens = tokenizers.encode(tokenizer, text)
        assert np.all((tokens >= 1) & (tokens < len(tokenizer)))


def test_text_that_spells_a_special_token_is_text():
    for text in ("<pad token>", "<unknown token>", "<pad token> mara"):
        assert set(tokenizers.encode(CHARACTERS, text)) == {1}
        assert 0 not in tokenizers.encode(WORDS, text)


def test_vocabulary_size_counts_up_to_the_greatest_id():
    assert tokenizers.vocabulary_size(WORDS) == len(WORDS)
    holes = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 7}, unk_token="a")))
    assert len(holes) == 2 and tokenizers.vocabulary_size(holes) == 8


def test_ids_that_end_a_text_by_hand():
    assert tokenizers.end_ids(WORDS, None) == ()
    assert tokenizers.end_ids(WORDS, 5) == (5,)
    ending = PreTrainedTokenizerFast(tokenizer_object=WORDS.backend_tokenizer, eos_token=WORDS.convert_ids_to_tokens(3))
    assert tokenizers.end_ids(ending, [3, 8]) == (3, 8) and tokenizers.end_ids(ending, None) == (3,)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
def test_the_architecture_beside_a_tokenizer_does_not_change_it(tmp_path, architecture):
    tokenizers.save_tokenizer(WORDS, tmp_path)
    (tmp_path / "config.json").write_text(f'{{"model_type": "{architecture}"}}')
    loaded = tokenizers.load_tokenizer(tmp_path)
    assert loaded.backend_tokenizer.to_str() == WORDS.backend_tokenizer.to_str()
    assert len(loaded) == len(WORDS) and loaded.eos_token_id is None


def test_a_saved_tokenizer_loads_as_the_same_function(tmp_path):
    for i, tokenizer in enumerate((CHARACTERS, WORDS)):
        folder = tmp_path / str(i)
        tokenizers.save_tokenizer(tokenizer, folder)
        loaded = tokenizers.load_tokenizer(folder)
        assert (loaded.pad_token_id, loaded.unk_token_id, len(loaded)) == (0, 1, len(tokenizer))
        for text in ("search mara\nnovak ; mara\n", "12+7\n=19\n", "<pad token> é"):
            tokens = tokenizers.encode(loaded, text)
            assert np.array_equal(tokens, tokenizers.encode(tokenizer, text))
            assert tokenizers.decode(loaded, tokens) == tokenizers.decode(tokenizer, tokens)


def test_a_folder_without_a_tokenizer_is_one_clear_line(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    with pytest.raises(ValueError, match="holds no tokenizer: tokenizer.json is missing") as caught:
        tokenizers.load_tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="missing does not exist"):
        tokenizers.load_tokenizer(tmp_path / "missing")


def test_a_corrupt_tokenizer_is_one_clear_line(tmp_path):
    tokenizers.save_tokenizer(WORDS, tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(ValueError, match="tokenizer cannot be read") as caught:
        tokenizers.load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_stop_id():
    assert tokenizers.stop_id(CHARACTERS, "\n") == 14
    assert tokenizers.stop_id(WORDS, "\n") == 6
    with pytest.raises(ValueError, match="'19' is 2 known tokens"):
        tokenizers.stop_id(CHARACTERS, "19")
    with pytest.raises(ValueError, match="stop text '!'"):
        tokenizers.stop_id(WORDS, "!")


@pytest.mark.parametrize(
    ("symbols", "word_level", "message"),
    [
        ([], True, "there are no symbols"),
        (["a", "b", "a"], False, "'a' is listed twice"),
        (["ab"], False, "'ab' is 2 characters"),
        (["a b"], True, "'a b' is not a word"),
        (["a\n"], True, "is not a word"),
        ([""], True, "is not a word"),
    ],
)
def test_bad_symbols_are_named(symbols, word_level, message):
    with pytest.raises(ValueError, match=message):
        tokenizers.build_tokenizer(symbols, word_level)


def test_markers_are_tokens_whatever_stands_around_them():
    from tests.tasks.chat_tokenizer import SPECIAL, chat_tokenizer

    assert set(tokenizers.markers(chat_tokenizer())) == set(SPECIAL)
    small = tokenizers.build_tokenizer(("a", "b"), False)
    assert set(tokenizers.markers(small)) == {tokenizers.PAD_TOKEN, tokenizers.UNKNOWN_TOKEN}
