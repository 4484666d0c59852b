"""What the predictor reads of a history: the policy's own tokens, or the same text in the tokens of another model.

A history is a list of blocks: the prompt, then one block a turn (the action's tokens and the observation's). Blocks are
turned into the predictor's tokens one by one, so a shorter history's tokens are a prefix of a longer one's, as long as
nothing is cut. The paper gives neither a length limit nor a side to cut (it speaks of serialised histories); both are
our choices.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from trace_jax.tree import query
from trace_jax.types import Prompt, RolloutTree

Recode = Callable[[np.ndarray], np.ndarray]  # the policy's tokens of a block, int32 [n] -> the predictor's, int32 [m]

_CACHED_BLOCKS = 4096  # a prompt's block is asked for when it is scored, when its anchors are, and by the fit


@dataclasses.dataclass(frozen=True)
class HistoryView:
    """From histories in the policy's tokens to sequences of at most `max_tokens` tokens for the predictor."""

    max_tokens: int  # L >= 1; see `shorten`
    recode: Recode | None = None  # None: the predictor reads the policy's ids
    skip: int = 0  # leading tokens of every prompt that are left out: text that all prompts share tells none apart

    def of_prompts(self, prompts: Sequence[Prompt]) -> list[np.ndarray]:
        """int32 [<= L] each: the views of bare prompts. Raises ValueError as `of_nodes`."""
        return [shorten([self._prompt(prompt.uid, prompt.tokens)], self.max_tokens) for prompt in prompts]

    def of_nodes(self, tree: RolloutTree, nodes: Sequence[int] | np.ndarray) -> list[np.ndarray]:
        """int32 [<= L] each: the views of the histories that end with `nodes`, never empty.

        Raises ValueError for a prompt of which nothing is left after `skip`, or no token in the predictor's vocabulary.
        """
        blocks: dict[int, np.ndarray] = {}
        views = []
        for node in nodes:
            path = query.path(tree, node).tolist()
            for i in path:
                if i not in blocks:
                    tokens = tree.token[tree.offset[i] : tree.offset[i + 1]]
                    blocks[i] = self._recoded(tokens) if i else self._prompt(tree.prompt_uid, tokens)
            views.append(shorten([blocks[i] for i in path], self.max_tokens))
        return views

    def _prompt(self, uid: str, tokens: np.ndarray) -> np.ndarray:
        if tokens.size <= self.skip:
            raise ValueError(
                f"prompt {uid!r} has {tokens.size} tokens, all among the first {self.skip} that the predictor's view "
                "leaves out; skip only what every prompt starts with"
            )
        block = self._recoded(tokens[self.skip :])
        if not block.size:
            raise ValueError(f"prompt {uid!r} is no token in the predictor's tokenizer; give it the policy's tokenizer")
        return block

    def _recoded(self, tokens: np.ndarray) -> np.ndarray:
        return tokens if self.recode is None else self.recode(tokens)


def shorten(blocks: Sequence[np.ndarray], max_tokens: int) -> np.ndarray:
    """The prompt's head and the newest turns, at most L = `max_tokens` tokens; everything where it fits.

    The turns have a room of L - min(P, L // 2) tokens, with P the size of the prompt. It takes the newest turns that
    fit whole; of a newest turn that is larger by itself, the last tokens. The prompt then keeps as many of its first
    tokens as are left of L: all of them if it is no longer than half of L. Whole turns, because the views of a
    rollout's anchors then share all that they keep until one more turn has to go. The last token is the history's,
    except where a prompt without turns is cut.

    Args:
      blocks: the prompt, then the turns, int32 [n_i] each.
      max_tokens: L >= 1.
    """
    prompt, turns = blocks[0], blocks[1:]
    room = max_tokens - min(prompt.size, max_tokens // 2)
    kept: list[np.ndarray] = []
    used = 0
    for turn in reversed(turns):
        if used + turn.size > room:
            if used == 0:
                kept, used = [turn[-room:]], room
            break
        kept.append(turn)
        used += turn.size
    return np.concatenate([prompt[: max_tokens - used], *reversed(kept)]).astype(np.int32, copy=False)


def recoder(decode: Callable[[np.ndarray], str], encode: Callable[[str], np.ndarray]) -> Recode:
    """The tokens of a block's text in another tokenizer; what was asked for lately is remembered.

    Args:
      decode: the policy's tokens -> text.
      encode: text -> the predictor's tokens, int32, without special tokens.
    """

    @functools.lru_cache(maxsize=_CACHED_BLOCKS)
    def of_bytes(block: bytes) -> np.ndarray:
        tokens = np.asarray(encode(decode(np.frombuffer(block, np.int32))), np.int32)
        tokens.flags.writeable = False  # many views hold it
        return tokens

    return lambda tokens: of_bytes(np.asarray(tokens, np.int32).tobytes())
