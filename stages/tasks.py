"""What a model can do for a request: generate text, embed texts, or score pairs of them."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Literal

from .errors import Refused

if TYPE_CHECKING:
    from .messages import Request

Task = Literal["generate", "embed", "score"]  # score: a number for a pair of texts, by a reranker

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
    """The task that a request needs."""
    if request.pooling is None:
        return "generate"
    return "score" if any(prompt.pair is not None for prompt in request.prompts) else "embed"


def check_task(task: Task, tasks: Collection[Task]) -> None:
    """Raises `Refused`, with the supported tasks, if `task` is not among the model's `tasks`."""
    if task not in tasks:
        able = "; ".join(_WHERE[name] for name in _WHERE if name in tasks)
        raise Refused(f"{_NOT[task]}; {able}", code="unsupported_task", param="model")
