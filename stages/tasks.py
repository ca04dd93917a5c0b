"""The tasks of a model: which one a request needs, and whether the model supports it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from .errors import Refused
from .messages import Request

Task = Literal["generate", "embed", "score"]  # score: one number per pair of texts, from a cross-encoder

_WHERE: dict[Task, str] = {
    "generate": "it generates text: use /v1/chat/completions or /v1/completions",
    "embed": "it embeds texts: use /v1/embeddings, /score or /rerank",
    "score": "it scores pairs of texts: use /score or /rerank",
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
