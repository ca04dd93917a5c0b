"""What the routes that look inside answer: stages, edges, requests under way, and a request's waterfall."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .openai import Count, Shape

Share = Annotated[float, Field(ge=0, le=1)]
Milliseconds = Annotated[float, Field(ge=0)]


class Limit(Shape):
    """What limits the pipeline, in a word and in a sentence."""

    situation: Literal[
        "idle", "slow client", "kv full", "slots full", "tokenizer", "grammar", "long prefill", "execute", "none"
    ]
    stage: str | None
    sentence: str


class StageShares(Shape):
    """Where a stage's time went; idle, busy and blocked are 1."""

    name: str
    idle: Share
    busy: Share
    blocked: Share
    is_busy: bool
    restarts: Count


class EdgeDepth(Shape):
    """A channel between two stages; `full` is the share of the time in which a sender had to wait."""

    name: str
    source: Annotated[str, Field(alias="from")]
    target: Annotated[str, Field(alias="to")]
    depth: Count
    capacity: Count
    high_water: Count
    sent: Count
    full: Share
    senders_waiting: Count


class StepRates(Shape):
    """Steps of the device."""

    per_s: Annotated[float, Field(ge=0)]
    rows: Annotated[float, Field(ge=0)]
    prompt_tokens_per_s: Annotated[float, Field(ge=0)]
    decode_tokens_per_s: Annotated[float, Field(ge=0)]


class Stages(Shape):
    """The pipeline now. Shares are of the last `window_s` seconds."""

    bottleneck: Limit
    window_s: Annotated[float, Field(gt=0)]
    stages: list[StageShares]
    edges: list[EdgeDepth]
    steps: StepRates
    waiting_for: dict[str, Share]


class LiveRequest(Shape):
    """A request under way."""

    id: str
    client_request_id: str
    stage: str
    state: str
    age_s: Annotated[float, Field(ge=0)]
    priority: int
    num_sequences: Count
    num_prompt_tokens: Count
    num_cached_tokens: Count
    num_generated_tokens: Count
    num_blocks: Count
    preemptions: Count


class Requests(Shape):
    """Oldest first. `next_cursor` leads to those behind them, if there are more."""

    object: Literal["list"]
    data: list[LiveRequest]
    has_more: bool
    next_cursor: Count | None


class CauseOfTime(Shape):
    """A part of a request's time; all of them are the whole."""

    name: str
    ms: Milliseconds
    share: Share
    sentence: str


class StageOfRequest(Shape):
    """How long a stage served a request, let it wait, and stood before a full edge with it."""

    stage: str
    service_ms: Milliseconds
    wait_ms: Milliseconds
    blocked_ms: Milliseconds


class StepsOfRequest(Shape):
    """The steps it took part in."""

    num_steps: Count
    first_step: Count | None
    last_step: Count | None
    num_prompt_steps: Count
    num_prompt_tokens: Count
    num_decode_rows: Count


class WaterfallBar(Shape):
    """A stretch of its time; each begins where the one before ends."""

    kind: Literal["service", "wait", "blocked", "preempted", "client"]
    stage: str | None
    begin_ms: Milliseconds
    ms: Milliseconds
    step: Count | None


class Explanation(Shape):
    """Where a request's time went. Of very many bars the first and the last are told; with `detail` summary, as the
    trace does not reach back to it, only what was noted of its life."""

    id: str
    detail: Literal["trace", "summary"]
    finished: bool
    finish_cause: str | None
    total_ms: Milliseconds
    sentence: str
    causes: list[CauseOfTime]
    stages: list[StageOfRequest]
    preempted_ms: Milliseconds
    client_ms: Milliseconds
    preemptions: Count
    num_sequences: Count
    steps: StepsOfRequest
    bars: list[WaterfallBar]
    num_bars: Count
