"""Qwen3-Reranker: a decoder that judges by its next token, "yes" or "no", whether a document answers a query.

Builds the prompt of the model card. The score is the probability of "yes" against "no"; `stages/device/pooler.py`
computes it.
"""

from __future__ import annotations

from ...model.text.tokenizer import Side, Tokenizer

NAME = "qwen3-reranker"  # part of the names of these checkpoints, in lower case
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"

_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_TOKENS = ("yes", "no", "<|im_start|>", "<|im_end|>", "<think>", "</think>")


def is_named(model_id: str) -> bool:
    """Whether a folder's name or a Hub id, without its owner, is that of a Qwen3-Reranker."""
    return NAME in model_id.rpartition("/")[2].lower()


def missing_tokens(tokenizer: Tokenizer) -> list[str]:
    """The tokens that the prompt or the answer needs and the tokenizer lacks."""
    return [token for token in _TOKENS if tokenizer.token_id(token) is None]


class YesNoPrompt:
    """Turns an instruction, a query and a document into the ids of one prompt. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """`tokenizer` must have all tokens; `missing_tokens` lists those that it lacks."""
        self._tokenizer = tokenizer
        yes, no = tokenizer.token_id("yes"), tokenizer.token_id("no")
        assert yes is not None and no is not None
        self.token_ids = (yes, no)
        self._before, self._after = (tokenizer.encode(text, add_special_tokens=False) for text in (_BEFORE, _AFTER))

    def encode(
        self, query: str, document: str, most: int, side: Side | None = None, instruction: str | None = None
    ) -> list[int]:
        """At most `most` ids: what is around the texts stays, and the document is cut first.

        Special tokens that the texts spell are encoded as plain text. Raises ValueError if `most` leaves no room.
        """
        room = most - len(self._before) - len(self._after)
        if room <= 0:
            raise ValueError(f"{most} tokens: must be above {most - room}, the number of tokens around the texts")
        opening = f"<Instruct>: {INSTRUCTION if instruction is None else instruction}\n<Query>: {query}\n<Document>: "
        ids = self._tokenizer.encode_plain(opening + document)
        if len(ids) > room:
            ids = self._cut(opening, document, ids, room, side or self._tokenizer.truncation_side)
        return [*self._before, *ids, *self._after]

    def _cut(self, opening: str, document: str, ids: list[int], room: int, side: Side) -> list[int]:
        """At most `room` of the `ids` of both texts. On the left, the part after the opening is cut."""
        kept = self._tokenizer.encode_plain(opening) if side == "left" else []
        num_left = room - len(kept)
        if side == "right" or num_left <= 0:
            return ids[:room]
        return [*kept, *self._tokenizer.encode_plain(document)[-num_left:]]
