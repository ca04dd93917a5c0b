"""The scripted engine: an engine without a model, for tests.

Import it from `millrace.stages.testing`. It is the real engine with all seven stages. A scripted device (see
`device.py`) replaces the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ....model.pooling import PoolingConfig
from ....model.text.vocabulary import Vocabulary
from ....runtime.env.env import Env
from ....runtime.histogram import Histogram
from ....runtime.pipeline import NotServing
from ....runtime.startup.phases import Phases
from ...allocate.prefix_cache import PrefixCache
from ...allocate.tiers.block_pool import BlockPool
from ...allocate.tiers.block_tables import BlockTables
from ...allocate.tiers.host_tier import HostTier
from ...config import EngineConfig, resolve_step_size
from ...device.device import Device
from ...engine.core import EngineSetup
from ...engine.engine import Engine
from ...engine.local_core import LocalCore
from ...engine.placed_stages import PlacedStage
from ...engine.wiring import EngineStages
from ...grammar.compiled import Grammars
from ...messages import Ints
from ...outputs import ModelInfo
from ...params import SamplingParams
from ...request_limits import longest_sequence
from ...schedule.scheduler import Scheduler
from .async_device import AsyncScriptedDevice, AsyncScriptedModel
from .byte_tokenizer import EOS, VOCAB_SIZE, ByteTokenizer
from .device import ScriptedDevice, ScriptedModel
from .script import EMBEDDING_SIZE, Script

CONTEXT, NUM_BLOCKS = 512, 256  # of the scripted model; blocks of 16 tokens
SMALL = EngineConfig(
    max_model_len=CONTEXT, max_num_seqs=16, max_num_batched_tokens=256, num_gpu_blocks=NUM_BLOCKS, block_size=16
)

Answer = str | Callable[[str], str]


class ScriptedEngine(Engine):
    """An `Engine` with a scripted device: same API, no weights, no torch, ready in milliseconds.

    `model` is the scripted device. Leaving the context raises AssertionError for the violations it saw.
    """

    def __init__(
        self,
        config: EngineConfig = SMALL,
        script: Script | None = None,
        *,
        step_s: float = 0.0,
        env: Env | None = None,
        is_async: bool = False,
        stages: Sequence[PlacedStage | str] = (),
        **overrides: Any,
    ) -> None:
        assert not (is_async and step_s), "step_s must be 0 with is_async: the streams decide how long a step takes"
        super().__init__(_resolved(config, overrides), core=self._make_core, env=env, stages=stages)
        if is_async:
            self.model: ScriptedModel = _async_model(self.config, script, self._env)
        else:
            self.model = _model(self.config, script, self._env, step_s)

    def _make_core(self, setup: EngineSetup) -> LocalCore:
        async def load(setup: EngineSetup) -> tuple[Any, Phases]:
            phases = Phases(setup.env.now)
            return _loaded(setup.config, self.model, phases), phases

        self._local = LocalCore(setup, load=load, warm_up=None)  # there is no lazy initialization
        return self._local

    # -- the parts, for inspection

    @property
    def parts(self) -> EngineStages:
        """The stages."""
        if self._local.stages is None:
            raise NotServing(self.health)
        return self._local.stages

    @property
    def scheduler(self) -> Scheduler:
        """Sequences, slots, counters."""
        return self.parts.schedule.scheduler

    @property
    def pool(self) -> BlockPool:
        """The KV blocks."""
        return self.parts.allocate.allocator.pool

    @property
    def host_tier(self) -> HostTier | None:
        """None if the engine has none."""
        return self.parts.allocate.allocator.host

    @property
    def block_tables(self) -> BlockTables:
        """Those of the running sequences."""
        return self.parts.allocate.allocator.tables

    @property
    def prefix_cache(self) -> PrefixCache | None:
        """None if it is off."""
        return self.parts.allocate.allocator.cache

    @property
    def step_tokens(self) -> Histogram:
        """Tokens computed per step, over all steps so far."""
        return self.parts.allocate.step_tokens

    @property
    def idle_gaps_us(self) -> Histogram | None:
        """As in `CoreStatus`."""
        return self.parts.device.idle_gaps_us

    def reset_prefix_cache(self) -> int:
        """As `forget_prefixes`, without waiting."""
        return self._local.reset_prefix_cache()

    async def check_quiet(self, timeout_s: float = 5.0) -> None:
        """Waits until nothing is left of any request.

        Raises AssertionError if something is, after `timeout_s`.
        """
        deadline = self._env.now() + timeout_s
        while self._env.now() < deadline:
            with suppress(AssertionError):
                return check_quiet(self.parts, self.model)
            await self._env.sleep(0.002)
        check_quiet(self.parts, self.model)

    async def __aexit__(self, *exc_info: object) -> None:
        await super().__aexit__(*exc_info)
        _check_violations(self.model)


def scripted_engine(
    config: EngineConfig = SMALL,
    *,
    answer: Answer | None = None,
    script: Script | None = None,
    step_s: float = 0.0,
    env: Env | None = None,
    is_async: bool = False,
    stages: Sequence[PlacedStage | str] = (),
    **overrides: Any,
) -> ScriptedEngine:
    """An engine without a model: `async with scripted_engine() as engine`.

    `answer` is the answer to every prompt, or a function from the prompt's text to it. The text of a chat prompt is
    like `<|user|>Hi<|end|><|assistant|>`. Without `answer` and `script`, answers are letters drawn from a hash of the
    prompt. Each step takes `step_s` seconds. With `is_async` the device is asynchronous, on simulated streams; this
    excludes `answer`. `stages` are as for `Engine`. `overrides` are fields of `EngineConfig`.
    """
    if answer is not None:
        script = replace(script or Script(), answer=_as_tokens(answer))
    return ScriptedEngine(config, script, step_s=step_s, env=env, is_async=is_async, stages=stages, **overrides)


def _as_tokens(answer: Answer) -> Callable[[Sequence[int], int], Sequence[int]]:
    tokenizer = ByteTokenizer()

    def tokens(prompt: Sequence[int], seed: int) -> list[int]:
        text = answer if isinstance(answer, str) else answer(tokenizer.decode(prompt, skip_special_tokens=False))
        return tokenizer.encode_text(text)

    return tokens


# -- the pipeline alone


class ScriptedPipeline(EngineStages):
    """A pipeline with a scripted device, not started, and its parts, for inspection in tests."""

    def __init__(self, config: EngineConfig, model: ScriptedModel) -> None:
        super().__init__(config, _loaded(config, model), _device(model))
        self.config = config
        self.model = model

    def check(self) -> None:
        """Checks the invariants that hold between any two steps; see `check_parts`."""
        check_parts(self, self.model)

    def check_quiet(self) -> None:
        """Raises AssertionError unless nothing is left of any request; see `check_quiet`."""
        check_quiet(self, self.model)


def scripted_pipeline(
    config: EngineConfig = SMALL, script: Script | None = None, env: Env | None = None, *, is_async: bool = False
) -> ScriptedPipeline:
    """The engine's own pipeline with a scripted device and a tokenizer of bytes.

    `config` gives the sizes; an unset length or pool size is that of `SMALL`. `env` is the environment to run in. With
    `is_async`, which needs an `env`, the device is asynchronous, on simulated streams.
    """
    config = _resolved(config, {})
    made = ScriptedPipeline(config, _async_model(config, script, env) if is_async else _model(config, script, env))
    if env is not None:
        made.pipeline.use(env)
    return made


def check_parts(parts: EngineStages, model: ScriptedModel) -> None:
    """Raises AssertionError unless the invariants hold that must hold between any two steps.

    Blocks are counted and owned (I3, I4), each sequence is in one state, and the device saw no violation (I2, I13).
    """
    _check_violations(model)
    parts.allocate.allocator.check()
    parts.schedule.scheduler.check()


def check_quiet(parts: EngineStages, model: ScriptedModel) -> None:
    """Raises AssertionError unless nothing is left of any request.

    Blocks are free (I3), channels are empty (I6), and no map has an entry (I10).
    """
    check_parts(parts, model)
    pool, scheduler, admission = parts.allocate.allocator.pool, parts.schedule.scheduler, parts.intake.admission
    host = parts.allocate.allocator.host
    if host is not None:
        assert not len(host), f"{len(host)} sequences are on the host and none runs"
        assert host.pool.num_in_use == 0, f"{host.pool.num_in_use} host blocks are in use and no sequence runs"
        assert host.pool.num_quarantined == 0, f"{host.pool.num_quarantined} host blocks are quarantined, for no step"
    if parts.allocate.allocator.cache is not None:
        parts.allocate.allocator.cache.check()
    assert pool.num_in_use == 0, f"{pool.num_in_use} blocks are in use and no sequence runs"
    assert pool.num_quarantined == 0, f"{pool.num_quarantined} blocks are quarantined and no step is in flight"
    assert not scheduler.sequences, f"schedule still knows sequences {sorted(scheduler.sequences)}"
    assert not parts.exit.live, f"the exit still knows {sorted(parts.exit.live)}"
    assert not parts.detokenize.num_sequences, f"detokenize still knows {parts.detokenize.num_sequences} sequences"
    assert not admission.num_admitted, f"intake still counts {admission.num_admitted} requests"
    assert not admission.num_waiting, f"intake still counts {admission.num_waiting} that wait"
    for name, channel in parts.pipeline.channels.items():
        stats = channel.stats()
        assert stats.depth == 0 and channel.num_waiting == 0, f"channel {name} still holds {stats.depth}"
        assert channel.num_promised == 0, f"channel {name} reserves room for {channel.num_promised} ended senders"
        assert stats.high_water <= stats.capacity, f"channel {name} held {stats.high_water} of {stats.capacity}"
        assert stats.num_sent == stats.num_received, f"channel {name} lost items"


def _check_violations(model: ScriptedModel) -> None:
    assert not model.violations, "the scripted device saw: " + "; ".join(model.violations[:5])


# -- the replacement of a model


@dataclass(frozen=True, slots=True, eq=False)
class _Scripted:
    """The scripted counterpart of `LoadedModel`."""

    info: ModelInfo
    tokenizer: ByteTokenizer
    encoder: ByteTokenizer
    text_table: ByteTokenizer
    runner: ScriptedModel
    sampler: ScriptedModel
    grammars: Grammars

    def make_device(self) -> Device:
        return _device(self.runner)

    def make_decoder(self, params: SamplingParams, prompt: Ints) -> Any:
        return self.tokenizer.decoder(params, prompt)


def _resolved(config: EngineConfig, overrides: dict[str, Any]) -> EngineConfig:
    config = resolve_step_size(replace(config, **overrides), is_native=False)
    num_gpu_blocks = config.num_gpu_blocks or NUM_BLOCKS
    max_model_len = config.max_model_len or CONTEXT
    if max_model_len == "auto":
        max_model_len = min(CONTEXT, longest_sequence(num_gpu_blocks, config.block_size))
    return replace(config, max_model_len=max_model_len, num_gpu_blocks=num_gpu_blocks)


def _model(config: EngineConfig, script: Script | None, env: Env | None, step_s: float = 0.0) -> ScriptedModel:
    num_blocks, max_model_len = config.num_gpu_blocks, config.max_model_len
    assert num_blocks is not None and isinstance(max_model_len, int)
    sizes = (num_blocks, config.block_size, config.max_num_seqs, max_model_len)
    return ScriptedModel(*sizes, script, env, step_s, config.num_cpu_blocks or 0, config.pipeline_parallel_size)


def _device(model: ScriptedModel) -> Device:
    return AsyncScriptedDevice(model) if isinstance(model, AsyncScriptedModel) else ScriptedDevice(model)


def _async_model(config: EngineConfig, script: Script | None, env: Env | None) -> AsyncScriptedModel:
    assert config.num_gpu_blocks is not None and isinstance(config.max_model_len, int) and env is not None
    sizes = (config.num_gpu_blocks, config.block_size, config.max_num_seqs, config.max_model_len)
    return AsyncScriptedModel(
        *sizes,
        script or Script(),
        env,
        config.num_cpu_blocks or 0,
        num_steps=config.steps_in_flight,
        max_step_tokens=config.num_step_tokens,
        num_verified_tokens=config.num_verified_tokens,
        num_lanes=config.pipeline_parallel_size,
    )


def _loaded(config: EngineConfig, model: ScriptedModel, phases: Phases | None = None) -> Any:
    assert isinstance(config.max_model_len, int) and config.num_gpu_blocks is not None
    tokenizer = ByteTokenizer()
    info = ModelInfo(
        model_id=config.model or "scripted",
        max_model_len=config.max_model_len,
        vocab_size=VOCAB_SIZE,
        dtype="float32",
        device="cpu",
        attention_backend="torch",
        eos_token_ids=(EOS,),
        num_blocks=config.num_gpu_blocks,
        block_size=config.block_size,
        has_chat_template=True,
        default_params=SamplingParams(),
        num_host_blocks=config.num_cpu_blocks or 0,
        max_num_batched_tokens=config.num_step_tokens,
        itl_target_ms=config.itl_target_ms or 0.0,
        pooling=PoolingConfig(
            kind="last" if config.pooling == "auto" or config.pooling == "yes_no" else config.pooling,
            size=EMBEDDING_SIZE,
        ),
        startup_s={} if phases is None else phases.seconds,
        short_length=model.script.short_length,
    )
    vocabulary = Vocabulary(tokenizer.bytes, tokenizer.special_ids, (EOS,), VOCAB_SIZE)
    return _Scripted(info, tokenizer, tokenizer, tokenizer, model, model, Grammars(lambda: vocabulary))
