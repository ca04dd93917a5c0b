"""Models of the answers of the inspection routes: stages, channels, running requests, and waterfalls."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ..api.schema.shapes import Count, Shape

Share = Annotated[float, Field(ge=0, le=1)]
Milliseconds = Annotated[float, Field(ge=0)]


class Limit(Shape):
    """The bottleneck of the pipeline, as a keyword and a sentence."""

    situation: Literal[
        "idle", "slow client", "kv full", "slots full", "tokenizer", "grammar", "long prefill", "execute", "none"
    ]
    stage: str | None
    sentence: str


class StageShares(Shape):
    """Shares of a stage's time; idle, busy and blocked add up to 1."""

    name: str
    idle: Share
    busy: Share
    blocked: Share
    is_busy: bool
    restarts: Count


class EdgeDepth(Shape):
    """A channel between two stages; `full` is the share of time in which it was full."""

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
    """Rates of the device's steps; `rows` is the mean per step."""

    per_s: Annotated[float, Field(ge=0)]
    rows: Annotated[float, Field(ge=0)]
    prompt_tokens_per_s: Annotated[float, Field(ge=0)]
    decode_tokens_per_s: Annotated[float, Field(ge=0)]


class Stages(Shape):
    """The state of the pipeline. Shares are of the last `window_s` seconds."""

    bottleneck: Limit
    window_s: Annotated[float, Field(gt=0)]
    stages: list[StageShares]
    edges: list[EdgeDepth]
    steps: StepRates
    waiting_for: dict[str, Share]


class LiveRequest(Shape):
    """A running or waiting request."""

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
    front: Count | None = None  # of several, that has it


class Requests(Shape):
    """Requests, oldest first. `next_cursor` is the cursor of the next page, if there are more."""

    object: Literal["list"]
    data: list[LiveRequest]
    has_more: bool
    next_cursor: Count | None


class CauseOfTime(Shape):
    """A part of a request's time; all parts add up to the total."""

    name: str
    ms: Milliseconds
    share: Share
    sentence: str


class StageOfRequest(Shape):
    """Times of a request at a stage: service, waiting for the stage, and blocked by the next channel."""

    stage: str
    service_ms: Milliseconds
    wait_ms: Milliseconds
    blocked_ms: Milliseconds


class StepsOfRequest(Shape):
    """The steps that computed the request."""

    num_steps: Count
    first_step: Count | None
    last_step: Count | None
    num_prompt_steps: Count
    num_prompt_tokens: Count
    num_decode_rows: Count


class WaterfallBar(Shape):
    """A period of a request's time; each begins at the end of the previous one."""

    kind: Literal["service", "wait", "blocked", "preempted", "client"]
    stage: str | None
    begin_ms: Milliseconds
    ms: Milliseconds
    step: Count | None


class Explanation(Shape):
    """The waterfall of a request. Of very many bars only the first and the last are included.

    With `detail` summary, if the trace no longer covers the request, it has only its main times.
    """

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
