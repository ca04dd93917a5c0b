"""Answers that a user's stage gives by itself, without the model: `out.reply(reply_text(request, "Hello"))`."""

from __future__ import annotations

from collections.abc import Sequence

from ..runtime.message import message
from .messages import NO_INTS, Ints, Request, TokenRequest


@message
class Reply:
    """The whole answer to one prompt of a request, the same for each of its choices.

    The request's usage counts `prompt_ids` and `token_ids`. The device has no part in it, so it has no times of one.
    """

    request_id: str
    sequence_ids: Sequence[int]  # of the choices
    text: str
    token_ids: tuple[int, ...]  # of the text, if they are known
    prompt_ids: Ints  # [P] if they are known


def reply_text(request: Request | TokenRequest, text: str, token_ids: Sequence[int] = ()) -> Reply:
    """The answer `text` to all choices of a request, before tokenize, or of one of its prompts, after it.

    `token_ids` are the tokens of `text`, for the usage; none count without them. The request, or the prompt, ends with
    its reply: do not send it on.
    """
    first, num = request.first_sequence_id, request.params.n
    prompt_ids = NO_INTS
    if isinstance(request, Request):
        num = request.num_sequences
    else:
        prompt_ids = request.token_ids
    return Reply(request.request_id, range(first, first + num), text, tuple(map(int, token_ids)), prompt_ids)
