"""Models of the answers of Ollama's API. As with `schema/shapes.py`, the server does not use them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from ...errors import MAX_MESSAGE_CHARS
from ..schema.shapes import Count, Shape


class OllamaError(Shape):
    """An error in Ollama's shape, as a body and as the last line of a stream that failed."""

    error: Annotated[str, Field(min_length=1, max_length=MAX_MESSAGE_CHARS)]


class OllamaFunctionCall(Shape):
    """The function of a call."""

    index: Count
    name: str
    arguments: dict[str, Any]


class OllamaCall(Shape):
    """A call of a tool."""

    id: str
    function: OllamaFunctionCall


class OllamaMessage(Shape):
    """A message, or a piece of one."""

    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None


class OllamaEnd(Shape):
    """The common fields of answers and lines. Counts and durations, in nanoseconds, come with the end."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "abort", "load"] | None = None
    logprobs: list[dict[str, Any]] | None = None
    total_duration: Count | None = None
    load_duration: Count | None = None
    prompt_eval_count: Count | None = None
    prompt_eval_duration: Count | None = None
    eval_count: Count | None = None
    eval_duration: Count | None = None


class OllamaChatAnswer(OllamaEnd):
    """An answer to a chat, or a line of one."""

    message: OllamaMessage


class OllamaAnswer(OllamaEnd):
    """An answer to a prompt, or a line of one."""

    response: str
    thinking: str | None = None
    context: list[Count] | None = None


class OllamaVectors(Shape):
    """Embeddings, in input order."""

    model: str
    embeddings: list[list[float]]
    total_duration: Count
    load_duration: Count
    prompt_eval_count: Count


class OllamaVector(Shape):
    """One embedding."""

    embedding: list[float]


class OllamaFormat(Shape):
    """How a model is stored, and its size in words."""

    parent_model: str
    format: Literal["gguf", "safetensors"]
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModelDetails(Shape):
    """Details of a served name."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaFormat
    model_info: dict[str, Any]
    capabilities: list[Literal["completion", "tools", "thinking", "embedding"]]
    modified_at: str


class OllamaModel(Shape):
    """A served name. `digest` is of facts about the model, not of its files."""

    name: str
    model: str
    size: Count
    digest: str
    details: OllamaFormat
    modified_at: str | None = None
    expires_at: str | None = None
    size_vram: Count | None = None
    context_length: Count | None = None


class OllamaModels(Shape):
    """All served names."""

    models: list[OllamaModel]


class OllamaStatus(Shape):
    """The state of a download."""

    status: Literal["success"]


class OllamaVersion(Shape):
    """The version of Ollama's API, and that of this server."""

    version: str
    millrace: str
