"""What a model can be asked for, and what a request asks for. Plain words, shared by the door and the server."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from .errors import Refused
from .messages import Request

Task = Literal["generate", "embed", "score"]  # score: a number for a pair of texts, from a cross-encoder

_WHERE: dict[Task, str] = {
    "generate": "it generates text: ask /v1/chat/completions or /v1/completions",
    "embed": "it embeds texts: ask /v1/embeddings, /score or /rerank",
    "score": "it scores pairs of texts: ask /score or /rerank",
}
_NOT: dict[Task, str] = {
    "generate": "this model does not generate text",
    "embed": "this model has no embeddings",
    "score": "this model does not read pairs of texts",
}


def task_of(request: Request) -> Task:
    """What a request asks for."""
    if request.pooling is None:
        return "generate"
    return "score" if any(prompt.pair is not None for prompt in request.prompts) else "embed"


def check_task(task: Task, tasks: Collection[Task]) -> None:
    """Raises `Refused` for what is none of the model's `tasks`, and says what they are."""
    if task not in tasks:
        able = "; ".join(_WHERE[name] for name in _WHERE if name in tasks)
        raise Refused(f"{_NOT[task]}; {able}", code="unsupported_task", param="model")
