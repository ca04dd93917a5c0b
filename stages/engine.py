"""The engine: a model, the seven stages around it, and the Python interface to both.

    async with Engine(model="path/or/hub-id") as engine:
        async for output in engine.generate("Once upon a time"):
            print(output.outputs[0].text, end="")

Knows how the parts are put together, started and taken apart. What they do is theirs.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..runtime.cpus import lower_priority
from ..runtime.env import Env, LiveEnv
from ..runtime.histogram import Histogram
from ..runtime.inject import Fault, parse_fault
from ..runtime.log import get_logger
from ..runtime.pipeline import Busy, Health, NotServing, Pipeline
from ..runtime.stage import Stage
from ..runtime.trace import EventKind, Tracer
from .admission import Admission
from .beams import BeamParams
from .blocks import BlockPool, BlockTables
from .config import EngineConfig
from .device import Device
from .embedding import Pairs, as_texts, pooled_request, read_vectors
from .errors import ConfigError, Overloaded, Refused, TimedOut
from .grammar.grammar_gate import GrammarGate
from .grammar.grammars import Grammars
from .host import HostTier
from .limits import as_token_ids
from .messages import ChatPrompt, Ints, Prompt, Request
from .outbox import Outboxes, RequestOutbox
from .outputs import (
    EmbeddingRequestOutput,
    ModelInfo,
    OutputKind,
    RequestOutput,
    ScoringRequestOutput,
)
from .params import SamplingParams
from .parts import EncoderParts, EngineParts, TextParts
from .phases import Phases
from .pooling import Floats, PoolingParams
from .prefix import PrefixCache
from .processors import LogitsProcessor
from .reading import read_outputs
from .recordings.recorder import Recorder
from .scheduler import Scheduler
from .tasks import check_task, task_of
from .warm_up import warm_up

if TYPE_CHECKING:
    from ..model.tokenizer import Tokenizer
    from .encoder import ModelEncoder
    from .encoder_loading import LoadedEncoder
    from .loading import LoadedModel

PromptLike = str | Sequence[int] | Prompt
Messages = Sequence[Mapping[str, Any]]

log = get_logger("millrace.stages")


class Engine:
    """Serves one model. Use it as an async context manager, or `start` and `stop` it; it starts once.

    Leaving frees everything: memory, threads, tasks. Requests under way then end with `abort`. It lives on the loop it
    was started on, keeps no global state and handles no signals, so there may be several in a process. `config` and
    `overrides` are those of `EngineConfig`. With an `env` of the caller's, threads end when the caller closes it.
    A `logits_processor` is yours to write, see `LogitsProcessor`.
    """

    mode: ClassVar[Literal["inline", "split"]] = "inline"  # whether the step loop is in this process or one of its own

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        env: Env | None = None,
        logits_processor: LogitsProcessor | None = None,
        **overrides: Any,
    ) -> None:
        self._logits_processor = logits_processor
        self.config = replace(config or EngineConfig(), **overrides)
        if logits_processor is not None:  # it is to see each token before the next one is chosen
            self.config = replace(self.config, speculation="off")
        self._env: Env = LiveEnv(self.config.seed) if env is None else env
        self._owns_env = env is None
        self._health = Health("new")
        self._parts: TextParts | EncoderParts | None = None
        self._info: ModelInfo | None = None
        self._request_numbers = itertools.count()
        self._edits: list[Callable[[Pipeline], object]] = []
        self._recorder: Recorder | None = None

    # -- stages of your own

    def insert(self, stage: Stage[Any, Any], after: str, *, name: str | None = None) -> None:
        """Puts a stage of yours behind the one called `after`: "intake", "tokenize", ... "detokenize". Before `start`.

        What does not fit there is refused at the start, with the ports and the mend. The stage sees every request, the
        engine's own warm-up (request id "warm-up") included.
        """
        self._edit(lambda pipeline: pipeline.insert(stage, after, name=name))
        self._step_plainly(after)

    def replace(self, name: str, stage: Stage[Any, Any]) -> None:
        """Puts a stage of yours in the place of the one called `name`. Before `start`."""
        self._edit(lambda pipeline: pipeline.replace(name, stage))
        self._step_plainly(name)

    def _step_plainly(self, name: str) -> None:
        """Whoever takes steps from the device sees logits, and need not know of drafts, unless they were asked for by
        name."""
        if name in ("execute", "sample"):
            speculation = "off" if self.config.speculation == "auto" else self.config.speculation
            self.config = replace(self.config, speculation=speculation, async_scheduling=False)

    def _edit(self, edit: Callable[[Pipeline], object]) -> None:
        if self._health.state != "new":
            raise RuntimeError(f"the engine is {self._health.state}: change its stages before it starts")
        self._edits.append(edit)

    # -- life

    async def start(self) -> None:
        """Loads the model and starts the stages; returns when a first answer has been generated.

        Raises `ConfigError` or `ModelError` for what is wrong with the settings or the model.
        """
        if self._health.state != "new":
            raise RuntimeError(f"an engine starts once, and this one is {self._health.state}: make another")
        self._health = Health("loading", reason="the model is loading")
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        loaded, phases = await self._load()
        if self._logits_processor is not None:
            loaded.sampler.use(self._logits_processor)
        with phases("pipeline"):
            self._parts = self._make_parts(loaded)
            self._info = loaded.info
            self._parts.pipeline.use(self._env, Tracer(self._env))
            for edit in self._edits:
                edit(self._parts.pipeline)
            if self.config.record is not None:
                self._recorder = self._record(Path(self.config.record))
            faults = self._faults(self._parts.pipeline)
            await self._parts.pipeline.start()
        with phases("warm_up"):
            await self._warm_up()
        if self._computes_here:
            self._env.yield_to("device")
        await self._inject(self._parts.pipeline, faults)
        self._health = Health("ready")
        seconds = {f"{name}_s": seconds for name, seconds in phases.seconds.items()}
        info = loaded.info
        log.info(
            "engine.ready",
            model=info.model_id,
            device=info.device,
            dtype=info.dtype,
            quantization=info.quantization,
            kv_cache_dtype=info.kv_cache_dtype,
            weights_bytes=None if info.memory is None else info.memory.row("weights").num_bytes,
            max_model_len=info.max_model_len,
            num_blocks=info.num_blocks,
            num_host_blocks=info.num_host_blocks,
            num_speculative_tokens=self.scheduler.speculation.num_tokens if self.has_core else 0,
            **seconds,
        )

    def give_way(self) -> None:
        """For whoever owns the event loop's thread, to be called on it once the engine is ready: that thread, and what
        it starts from then on, runs at a lower priority than those that compute. An engine does so with its own threads
        by itself, and with its caller's never."""
        if self._computes_here:
            lower_priority()

    @property
    def _computes_here(self) -> bool:
        """Whether steps are computed by threads of ours, which all else takes the cores from."""
        return self._info is not None and self._info.attention_backend == "native"

    def _faults(self, pipeline: Pipeline) -> list[Fault]:
        """Those that the configuration asks for. `ConfigError` if there is no such stage."""
        faults = [parse_fault(text) for text in self.config.inject]
        names = self._stage_names(pipeline)
        for fault in faults:
            if fault.stage not in names:
                stages = ", ".join(names)
                raise ConfigError(f"inject: there is no stage {fault.stage}; there are {stages}")
            log.warning("fault.injected", stage=fault.stage, kind=fault.kind, rate=fault.rate, delay_s=fault.delay_s)
        return faults

    def _stage_names(self, pipeline: Pipeline) -> list[str]:
        return list(pipeline.stages)

    async def _load(self) -> tuple[Any, Phases]:
        """The model, and how long each phase took. In a thread. The test double has neither file nor thread."""
        return await self._env.run_in_thread(_load, self.config, self._env)

    def _make_parts(self, loaded: Any) -> TextParts | EncoderParts:
        """Of what `_load` gave."""
        if not loaded.info.num_blocks:
            return EncoderParts(self.config, loaded)
        secret = self._env.secret("prefix.secret", 16)
        return EngineParts(self.config, loaded, self._make_device(loaded), secret)

    async def _inject(self, pipeline: Pipeline, faults: Sequence[Fault]) -> None:
        pipeline.inject(faults)

    def _record(self, path: Path) -> Recorder | None:
        if not isinstance(self._parts, EngineParts):
            raise ConfigError(f"record = {path}: this model generates nothing, so nothing is scheduled")
        return self._parts.record(path, self.config, self._env)

    def _make_device(self, loaded: LoadedModel) -> Device:
        return loaded.make_device()

    async def _warm_up(self) -> None:
        await warm_up(self.pipeline, self.info)
        await self.forget_prefixes()

    async def stop(self, cause: str = "server_shutdown") -> None:
        """Ends what is under way, and frees everything. May be called again."""
        self._health = Health("stopped", reason="the engine has been stopped")
        parts, self._parts = self._parts, None
        if parts is not None:
            for request_id in list(parts.exit.live):
                parts.pipeline.cancel(request_id, cause)
            if isinstance(parts, TextParts):
                await parts.searches.wait_until_over()
            await parts.pipeline.stop()
            if isinstance(parts, TextParts):
                await parts.gate.aclose()
        if self._recorder is not None:
            await self._recorder.aclose()
        if self._owns_env:
            await self._env.aclose()
        if parts is not None:
            is_on_gpu = self._info is not None and self._info.device != "cpu"
            del parts
            _free_memory(is_on_gpu)

    @property
    def engine_pid(self) -> int | None:
        """The process of the step loop, if it has one of its own."""
        return None

    @property
    def num_deaths(self) -> int:
        """Engine processes that have ended by themselves."""
        return 0

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Takes nothing new and waits for what is under way; False if some of it is left after `timeout_s`."""
        return await self.pipeline.drain(timeout_s)

    async def __aenter__(self) -> Engine:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    @property
    def health(self) -> Health:
        """Whether requests are taken, and if not, why."""
        if self._health.is_ready and self._parts is not None:
            return self._parts.pipeline.health
        return self._health

    # -- asking

    async def generate(
        self,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        timeout_s: float | None = None,
        output_kind: OutputKind = "delta",
    ) -> AsyncIterator[RequestOutput]:
        """Goes on with a prompt: text, or token ids.

        Yields what is new ("delta"), all there is so far each time ("cumulative"), or the whole, once ("final").
        Leaving the loop cancels the request. Raises `RequestError` if it fails. Without `params`, the model's defaults.
        Requests find cached prefixes only of requests with the same `cache_salt`.
        """
        chosen = params or self.info.default_params
        prompts = (_as_prompt(prompt),)
        request = Request(self._request_id(request_id), prompts, chosen, priority=priority, cache_salt=cache_salt)
        async for output in self._ask(request, timeout_s, output_kind):
            yield output

    async def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        timeout_s: float | None = None,
        output_kind: OutputKind = "delta",
    ) -> AsyncIterator[RequestOutput]:
        """Answers `messages`, each with a role and a content. Without `params`, up to the end of the context."""
        chat = ChatPrompt(tuple(messages), add_generation_prompt, continue_final_message, template_kwargs or {})
        chosen = params or replace(self.info.default_params, max_tokens=None)
        prompts = (Prompt(chat=chat),)
        request = Request(self._request_id(request_id), prompts, chosen, priority=priority, cache_salt=cache_salt)
        async for output in self._ask(request, timeout_s, output_kind):
            yield output

    async def beam_search(
        self,
        prompt: PromptLike,
        width: int,
        max_tokens: int | None = 16,
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] = False,
        *,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        timeout_s: float | None = None,
    ) -> RequestOutput:
        """The `width` likeliest answers to a prompt, best first, each with its score. `BeamParams` says what is likely.

        `params` may bring stop strings and ids, min_tokens, ignore_eos and logprobs; what chooses among tokens is
        refused, and its n and max_tokens are not looked at. Cancelling the caller ends the search. Raises
        `RequestError` if it fails.
        """
        beams = BeamParams(width=width, length_penalty=length_penalty, early_stopping=early_stopping)
        chosen = replace(params or SamplingParams(temperature=0.0), n=width, max_tokens=max_tokens)
        prompts = (_as_prompt(prompt),)
        request = Request(self._request_id(request_id), prompts, chosen, priority=priority, cache_salt=cache_salt)
        outbox = self.submit_search(request, beams, deadline_s=timeout_s)
        try:
            (output,) = [output async for output in read_outputs(outbox, "final")]
        finally:
            self.abort(request.request_id)
        return output

    async def embed(
        self,
        prompt: PromptLike,
        pooling: PoolingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        timeout_s: float | None = None,
    ) -> EmbeddingRequestOutput:
        """The embedding of a prompt: one vector of its hidden states, of length 1 unless `pooling` says otherwise. It
        is computed among the sequences that generate. Raises `RequestError` if it fails."""
        request = pooled_request(
            self._request_id(request_id),
            [_as_prompt(prompt)],
            pooling or PoolingParams(),
            priority=priority,
            cache_salt=cache_salt,
        )
        outbox, (vector,) = await self._pool(request, timeout_s)
        return EmbeddingRequestOutput(
            request.request_id, vector, outbox.num_prompt_tokens, num_cached_tokens=outbox.num_cached_tokens
        )

    async def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well each document answers its query, in order: one query for all documents, or one each. By a
        cross-encoder's own judgement, or the cosine of two embeddings."""
        pairs, tasks = Pairs(as_texts(queries), as_texts(documents)), self.info.tasks
        request = pairs.request(self._request_id(request_id), tasks, priority=priority)
        outbox, vectors = await self._pool(request, timeout_s)
        scores, counts = pairs.scores(vectors, tasks), pairs.num_tokens(outbox, tasks)
        return [ScoringRequestOutput(request.request_id, *each) for each in zip(scores, counts, strict=True)]

    async def _pool(self, request: Request, timeout_s: float | None) -> tuple[RequestOutbox, list[Floats]]:
        outbox = await self.submit(request, wait=True, deadline_s=timeout_s)
        try:
            return outbox, await read_vectors(outbox)
        finally:
            self.abort(request.request_id)

    async def submit(self, request: Request, *, wait: bool = False, deadline_s: float | None = None) -> RequestOutbox:
        """Sends a request of any number of prompts in, and returns where to read its answers.

        Whoever gets the outbox reads it to its end, or calls `abort`. With `wait` False a burst that is more than the
        door can look at is refused with `Overloaded`, with True it is held back. Raises `NotServing` when not ready.
        A grammar is tried and compiled first; `Refused` says what is wrong with it.
        """
        if not self.health.is_ready:
            raise NotServing(self.health)
        structured = request.params.structured_outputs
        if structured is None:
            return await self._enter(request, wait, deadline_s)
        check_task(task_of(request), self.info.tasks)
        gate, began_s = self._text().gate, self._env.now()
        try:
            async with asyncio.timeout(deadline_s):
                await gate.admit(self._env, request.request_id, structured)
        except Overloaded as error:
            self._trace_shed(error, "grammar")
            raise
        except TimeoutError:
            message = "the time limit of the request passed while its grammar was looked at"
            raise TimedOut(message, stage="intake", has_begun=False) from None
        left_s = None if deadline_s is None else max(deadline_s - (self._env.now() - began_s), 0.0)
        looked_s = self._env.now() - began_s
        try:
            outbox = await self._enter(request, wait, left_s)
        except BaseException:
            gate.leave(request.request_id)
            raise
        tracer, first = self.pipeline.tracer, outbox.request.first_sequence_id
        tracer.emit(EventKind.REQUEST_GRAMMAR, tracer.source("grammar"), 0, first, int(looked_s * 1e6))
        return outbox

    async def _enter(self, request: Request, wait: bool, deadline_s: float | None) -> RequestOutbox:
        try:
            return await self.pipeline.submit(request, deadline_s=deadline_s, wait=wait)  # type: ignore[return-value]
        except Busy as error:
            waiting = self._require_parts().intake.admission.num_waiting
            overloaded = Overloaded(f"{error}: try again in 1 s", queue_depth=waiting, estimated_wait_s=1.0)
            self._trace_shed(overloaded, "door")
            raise overloaded from None
        except ValueError as error:  # a request id that is in use
            raise Refused(str(error), param="request_id") from None

    def _trace_shed(self, error: Overloaded, reason: str) -> None:
        tracer = self.pipeline.tracer
        counts = (int(error.estimated_wait_s * 1000), error.queue_depth, tracer.source(reason))
        tracer.emit(EventKind.REQUEST_SHED, tracer.source("door"), 0, *counts)

    async def render(self, request: Request) -> tuple[list[Ints], SamplingParams]:
        """What a request comes to before anything is computed: its prompts as token ids, and its params with all that a
        tokenizer settles. Raises `Refused` for what the stages from intake to tokenize would refuse."""
        parts = self._require_parts()
        parts.intake.limits.check(request)
        prompts, params = await parts.tokenize.encode(request)
        for encoded in prompts:
            parts.intake.limits.settle(params, len(encoded.token_ids))
        return [encoded.token_ids for encoded in prompts], params

    def submit_search(self, request: Request, beams: BeamParams, *, deadline_s: float | None = None) -> RequestOutbox:
        """As `submit`, for the `params.n` best answers that a beam search finds to each prompt: they arrive together,
        in the order of their scores. Raises `Refused` for params that have no meaning in a search."""
        if not self.health.is_ready:
            raise NotServing(self.health)
        try:
            check_task("generate", self.info.tasks)
            return self._text().searches.submit(request, beams, deadline_s)
        except ValueError as error:  # a request id that is in use
            raise Refused(str(error), param="request_id") from None

    def abort(self, request_id: str, cause: str = "cancel") -> bool:
        """Ends a request early; its blocks come free within a few steps. False if it is not under way."""
        return self._parts is not None and self._parts.pipeline.cancel(request_id, cause)

    async def _ask(self, request: Request, timeout_s: float | None, kind: OutputKind) -> AsyncIterator[RequestOutput]:
        outbox = await self.submit(request, wait=True, deadline_s=timeout_s)
        try:
            async for output in read_outputs(outbox, kind):
                yield output
        finally:
            self.abort(request.request_id)

    def _request_id(self, request_id: str | None) -> str:
        return f"request-{next(self._request_numbers)}" if request_id is None else request_id

    # -- text

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt. A long one takes its time; see `encoder` for use in a thread."""
        return self.encoder.encode_text(text)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        return self.tokenizer.decode(token_ids, skip_special_tokens)

    # -- parts

    @property
    def info(self) -> ModelInfo:
        """What was loaded. There once the engine has started, and stays."""
        if self._info is None:
            raise NotServing(self.health)
        return self._info

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._require_parts().loaded.tokenizer

    @property
    def encoder(self) -> ModelEncoder:
        """Prompts and chats to token ids, as the tokenize stage does it."""
        return self._require_parts().loaded.encoder

    @property
    def pipeline(self) -> Pipeline:
        """The stages and the channels between them, running."""
        return self._require_parts().pipeline

    @property
    def exit(self) -> Outboxes:
        """Where requests end, to be told of them."""
        return self._require_parts().exit

    @property
    def scheduler(self) -> Scheduler:
        """The books of schedule, to look at."""
        return self._core().schedule.scheduler

    @property
    def pool(self) -> BlockPool:
        """The books of the KV cache's blocks, to look at."""
        return self._core().allocate.allocator.pool

    @property
    def host_tier(self) -> HostTier | None:
        """The books of what was moved to the host's memory, to look at; None if nothing is ever moved there."""
        return self._core().allocate.allocator.host

    @property
    def block_tables(self) -> BlockTables:
        """Where the running sequences' keys and values lie, to look at."""
        return self._core().allocate.allocator.tables

    @property
    def prefix_cache(self) -> PrefixCache | None:
        """What is known of earlier prompts and answers, to look at; None if it is switched off."""
        return self._core().allocate.allocator.cache

    @property
    def step_tokens(self) -> Histogram:
        """Tokens computed in a step, of all steps so far."""
        return self._core().allocate.step_tokens

    @property
    def token_gaps_us(self) -> Histogram:
        """Microseconds between two tokens of an answer, of all answers so far."""
        return self._text().detokenize.gaps.histogram

    @property
    def idle_gaps_us(self) -> Histogram | None:
        """Microseconds that the device stood idle between two steps although there was work, of all steps so far; None
        where the steps are computed by the thread that is told to."""
        return self._core().device.idle_gaps_us

    @property
    def admission(self) -> Admission:
        """The counts at the door, to look at."""
        return self._require_parts().intake.admission

    @property
    def grammars(self) -> Grammars:
        """The books of the compiled grammars, to look at."""
        return self._text().grammars

    @property
    def grammar_gate(self) -> GrammarGate:
        """Where grammars are looked at, to look at."""
        return self._text().gate

    def reset_prefix_cache(self) -> int:
        """Forgets every cached prefix, so that nothing is found that was computed before. Returns the blocks freed."""
        if not self.has_core:
            return 0
        return self._core().allocate.reset_prefix_cache()

    async def forget_prefixes(self) -> int:
        """The same, wherever the blocks are."""
        return self.reset_prefix_cache()

    async def refresh(self, *, with_blocks: bool = False, with_stacks: bool = False) -> None:
        """Before one looks at books that may be in another process (`scheduler`, `pool`, stages and channels): what
        they show then is not older than this call. Which block is whose, and where tasks wait, is told if asked for.
        Here they are at hand."""

    @property
    def has_core(self) -> bool:
        """Whether there are a scheduler and blocks: not where the model reads texts at once."""
        return isinstance(self._require_parts(), TextParts)

    def _require_parts(self) -> TextParts | EncoderParts:
        if self._parts is None:
            raise NotServing(self.health)
        return self._parts

    def _text(self) -> TextParts:
        parts = self._require_parts()
        if not isinstance(parts, TextParts):
            raise AttributeError("a model that generates nothing has no scheduler, no blocks and no prefix cache")
        return parts

    def _core(self) -> EngineParts:
        parts = self._text()
        assert isinstance(parts, EngineParts), "the books of another process are its own"
        return parts


def _load(config: EngineConfig, env: Env) -> tuple[LoadedModel | LoadedEncoder, Phases]:
    """In a thread: what is imported for a model alone takes longer than a loop may stand still."""
    phases = Phases(env.now)
    with phases("import"):
        from .loading import load_model
    return load_model(config, phases, env), phases


def _free_memory(is_on_gpu: bool) -> None:
    """Returns what the model held now, and not whenever cycles of objects happen to be collected."""
    gc.collect()
    if is_on_gpu:
        import torch

        torch.cuda.empty_cache()


def _as_prompt(prompt: PromptLike) -> Prompt:
    if isinstance(prompt, Prompt):
        return prompt
    if isinstance(prompt, str):
        return Prompt(text=prompt)
    return Prompt(token_ids=as_token_ids(prompt))
