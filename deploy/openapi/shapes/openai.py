"""The shapes of answers, for the OpenAPI document and for tests: which fields there are, always or at times.

Answers are made as plain data, without these: `deploy/api/openai/answers.py` and the handlers make them, and tests hold
both to each other. A field without a default is in every answer. Names are OpenAI's and vLLM's.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ...errors import CODES, MAX_MESSAGE_CHARS

Count = Annotated[int, Field(ge=0)]
FinishReason = Literal["stop", "length", "abort", "error", "tool_calls"]


class Shape(BaseModel):
    """An object with these fields and no others."""

    model_config = ConfigDict(extra="forbid")


# -- errors


class ErrorDetails(Shape):
    """Of a refusal for want of room, or of a deadline that passed: where that was."""

    stage: str
    queue_depth: Count | None = None
    estimated_wait_s: Annotated[float, Field(ge=0)] | None = None


class ErrorInfo(Shape):
    """What went wrong."""

    message: Annotated[str, Field(min_length=1, max_length=MAX_MESSAGE_CHARS)]
    type: Annotated[str, Field(json_schema_extra={"enum": sorted({kind for _, kind in CODES.values()})})]
    param: str | None  # the field to change
    code: Annotated[str, Field(json_schema_extra={"enum": sorted(CODES)})]
    details: ErrorDetails | None = None


class Error(Shape):
    """The body of every answer that is an error, and the data of the last event but one of a stream that failed."""

    error: ErrorInfo


# -- generation


class CachedTokens(Shape):
    """Of the prompt's tokens."""

    cached_tokens: Count


class ThoughtTokens(Shape):
    """Of the answers' tokens."""

    reasoning_tokens: Count


class Usage(Shape):
    """Tokens of all prompts and all choices."""

    prompt_tokens: Count
    total_tokens: Count
    completion_tokens: Count
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ThoughtTokens | None = None  # of a model that marks its thoughts


class PromptLogprob(Shape):
    """Of a token of the prompt."""

    logprob: float
    rank: Count
    decoded_token: str


# the first token's are null, as nothing comes before it; then token id -> the token's own, and the likeliest ones
PromptLogprobs = list[dict[str, PromptLogprob] | None]
RequestMetrics = dict[str, float | int | dict[str, float | None] | None]  # times in milliseconds, counts, stages


class Progress(Shape):
    """How far a prompt has come, in tokens."""

    total: Count
    cached: Count
    cache: Count
    processed: Count
    time_ms: Annotated[float, Field(ge=0)]


class TopLogprob(Shape):
    """A token that was likely."""

    token: str
    logprob: float
    bytes: list[Annotated[int, Field(ge=0, le=255)]]


class ChatLogprob(TopLogprob):
    """The token that was chosen, and the likeliest ones."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Shape):
    """One entry a token."""

    content: list[ChatLogprob]


class CompletionLogprobs(Shape):
    """Parallel lists, one entry a token."""

    tokens: list[str]
    token_logprobs: list[float | None]  # null for the first token of a prompt that is echoed
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[Count]


class Choice(Shape):
    """What all choices have."""

    index: Count
    finish_reason: FinishReason | None
    stop_reason: str | int | None  # the stop string or token id that ended it
    token_ids: list[Count] | None = None  # with return_token_ids


class CalledFunction(Shape):
    """What is called, and with what: JSON as text."""

    name: str
    arguments: str


class ToolCall(Shape):
    """A call for the client to carry out."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Shape):
    """The answer. Without words beside calls or thoughts, its content is null."""

    role: Literal["assistant"]
    content: str | None
    reasoning: str | None = None
    reasoning_content: str | None = None  # the same, by its other name
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Choice):
    """An answer to a chat."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None


class FunctionDelta(Shape):
    """The name, once, or a piece of the arguments."""

    name: str | None = None
    arguments: str


class ToolCallDelta(Shape):
    """The beginning of a call, or a piece of its arguments."""

    index: Count
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class Delta(Shape):
    """A piece of an answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChunkChoice(Choice):
    """A piece of one choice."""

    delta: Delta
    logprobs: ChatLogprobs | None


class CompletionChoice(Choice):
    """How a prompt goes on; in a stream, a piece of that."""

    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[Count] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Generated(Shape):
    """What all answers and chunks have."""

    id: str
    created: Count
    model: str
    metrics: RequestMetrics | None = None  # with return_metrics, or where the server always tells them


class ChatCompletion(Generated):
    """The answer to a chat."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None
    prompt_token_ids: list[Count] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ChatCompletionChunk(Generated):
    """The data of an event of a streamed chat. After the last comes the text [DONE]."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[Count] | None = None
    prompt_progress: Progress | None = None


class Completion(Generated):
    """How the prompts go on."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: str | None


class CompletionChunk(Generated):
    """The data of an event of a streamed completion. After the last comes the text [DONE]."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None
    prompt_progress: Progress | None = None


# -- everything else


class Model(Shape):
    """A name that is served."""

    id: str
    object: Literal["model"]
    created: Count
    owned_by: str
    root: str
    parent: str | None
    max_model_len: Count
    permission: list[dict[str, Any]]


class Models(Shape):
    """All of them."""

    object: Literal["list"]
    data: list[Model]


class Tokens(Shape):
    """Token ids of a prompt."""

    count: Count
    max_model_len: Count
    tokens: list[Count]
    token_strs: list[str] | None


class Text(Shape):
    """What token ids spell."""

    prompt: str


class Aborted(Shape):
    """A request that was ended."""

    id: str
    aborted: Literal[True]


class CacheReset(Shape):
    """What became free."""

    freed_blocks: Count


class FlightFile(Shape):
    """A file of the flight recorder's. None: one was written seconds ago."""

    file: str | None


class ProfilerStarted(Shape):
    """A window is open, and what is seen in it goes to a file."""

    file: str
    seconds: Count


class ProfileFile(Shape):
    """What was seen in a window, as Chrome and Perfetto read it."""

    file: str
    num_bytes: Count


class TraceEvents(Shape):
    """Chrome's trace-event format."""

    traceEvents: list[dict[str, Any]]
    displayTimeUnit: Literal["ms"]


class Load(Shape):
    """What is under way, in sequences; shares are of 1, times in seconds."""

    server_load: Count
    waiting: Count
    running: Count
    swapped: Count
    kv_usage: float
    estimated_wait_s: float


class Version(Shape):
    """Of millrace."""

    version: str


class Alive(Shape):
    """The process answers."""

    status: Literal["alive"]


class Ready(Shape):
    """Requests are taken."""

    status: Literal["ready"]


class NotReady(Shape):
    """No request is taken, and why."""

    status: str
    stage: str | None
    reason: str | None


class ServedModel(Shape):
    """The model that runs."""

    id: str
    served_names: list[str]
    max_model_len: Count
    vocab_size: Count
    dtype: str
    quantization: str | None  # how matrices are kept; null: as dtype
    kv_cache_dtype: str | None  # of keys and values; null: there is no cache
    device: str
    attention_backend: str
    eos_token_ids: list[Count]
    has_chat_template: bool
    tasks: list[str]  # what it can be asked for
    embeddings: dict[str, Any] | None  # how they are made; null if it makes none


class Configuration(Shape):
    """The settings in effect; keys are hidden."""

    engine: dict[str, Any]
    server: dict[str, Any]


class MemoryRow(Shape):
    """A use of memory."""

    name: str
    bytes: Count
    place: Literal["device", "host"]
    what: str


class CacheSize(Shape):
    """Of the KV cache."""

    block_size: Count
    bytes_per_block: Count
    num_blocks: Count
    num_tokens: Count
    num_longest_sequences: Count


class Memory(Shape):
    """Where the memory goes."""

    device: str
    device_bytes: Count
    budget_bytes: Count
    total_bytes: Count
    host_bytes: Count
    rows: list[MemoryRow]
    kv_cache: CacheSize


class Blocks(Shape):
    """Of the KV cache, by state."""

    num_blocks: Count
    block_size: Count
    free: Count
    used: Count
    shared: Count
    cached: Count
    quarantined: Count


class Process(Shape):
    """Where the step loop runs."""

    mode: Literal["inline", "split"]
    engine_pid: Count | None


class Graphs(Shape):
    """CUDA graphs that were captured: of decoding steps by rows, of mixed ones by tokens, and what that took."""

    decode_rows: list[Count]
    mixed_tokens: list[Count]
    seconds: float
    bytes: Count


class ServerInfo(Shape):
    """What runs here, and with which settings."""

    version: str
    model: ServedModel
    config: Configuration
    memory: Memory | None
    graphs: Graphs | None
    startup_s: dict[str, float]
    process: Process
    blocks: Blocks | None


class DocumentInfo(Shape):
    """What is described."""

    title: str
    version: str
    description: str


class Document(Shape):
    """An OpenAPI document."""

    openapi: str
    info: DocumentInfo
    paths: dict[str, dict[str, Any]]
    components: dict[str, dict[str, Any]]
