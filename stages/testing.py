"""What tests of stages and of servers need: the engine without a model, and the kit for user stages. No torch.

    from millrace.stages.testing import conformance, scripted_engine

`scripted_pipeline` is the real pipeline, all seven stages, with a scripted device in place of a model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..runtime.env import Env
from ..runtime.pipeline import Pipeline
from .allocate import Allocate
from .config import EngineConfig
from .detokenize import Detokenize
from .execute import Execute
from .intake import Intake
from .limits import RequestLimits
from .outbox import Outboxes
from .pipeline import build_pipeline
from .sample import Sample
from .schedule import Schedule
from .scheduler import Limits
from .scripted import VOCAB_SIZE, ByteTokenizer, Script, ScriptedDevice, ScriptedModel
from .tokenize import Tokenize

SMALL = EngineConfig(max_model_len=512, max_num_seqs=16, max_num_batched_tokens=256, num_gpu_blocks=256, block_size=16)


@dataclass(frozen=True, slots=True)
class ScriptedPipeline:
    """The parts of a pipeline with a scripted device, for tests that look inside."""

    pipeline: Pipeline
    model: ScriptedModel
    intake: Intake
    tokenize: Tokenize
    schedule: Schedule
    allocate: Allocate
    detokenize: Detokenize
    exit: Outboxes
    config: EngineConfig

    def check(self) -> None:
        """Raises AssertionError for what should hold between any two steps: blocks counted and owned (I3, I4),
        sequences in one place each, and nothing that the device saw amiss (I13)."""
        assert not self.model.violations, "; ".join(self.model.violations)
        self.allocate.allocator.check()
        self.schedule.scheduler.check()

    def check_quiet(self) -> None:
        """Raises AssertionError unless nothing is left of any request: blocks free (I3), channels empty (I6), no entry
        in any map (I10)."""
        self.check()
        pool, scheduler = self.allocate.allocator.pool, self.schedule.scheduler
        assert pool.num_in_use == 0, f"{pool.num_in_use} blocks are in use and nobody runs"
        assert pool.num_quarantined == 0, f"{pool.num_quarantined} blocks are quarantined and no step is in flight"
        assert not scheduler.sequences, f"schedule still knows sequences {sorted(scheduler.sequences)}"
        assert not self.exit.live, f"the exit still knows {sorted(self.exit.live)}"
        assert not self.detokenize.num_sequences, f"detokenize still knows {self.detokenize.num_sequences} sequences"
        assert not self.intake.admission.num_admitted, f"intake still counts {self.intake.admission.num_admitted}"
        for name, channel in self.pipeline.channels.items():
            stats = channel.stats()
            assert stats.depth == 0 and channel.num_waiting == 0, f"channel {name} still holds {stats.depth}"
            assert stats.high_water <= stats.capacity, f"channel {name} held {stats.high_water} of {stats.capacity}"
            assert stats.num_sent == stats.num_received, f"channel {name} lost items"


def scripted_pipeline(
    config: EngineConfig = SMALL, script: Script | None = None, env: Env | None = None
) -> ScriptedPipeline:
    """The engine's own pipeline, not started, with a scripted device and a tokenizer of bytes.

    `config` gives the sizes (a length or pool that it leaves open is that of `SMALL`); `env` another world to run in.
    """
    max_model_len = config.max_model_len or SMALL.max_model_len
    num_blocks = config.num_gpu_blocks or SMALL.num_gpu_blocks
    assert max_model_len is not None and num_blocks is not None
    config = replace(config, max_model_len=max_model_len, num_gpu_blocks=num_blocks)
    limits = RequestLimits(vocab_size=VOCAB_SIZE, max_model_len=max_model_len)
    model = ScriptedModel(num_blocks, config.block_size, config.max_num_seqs, max_model_len, script, env)
    device = ScriptedDevice(model)
    tokenizer = ByteTokenizer()
    intake = Intake(limits, config.max_admitted_requests, config.max_waiting_requests)
    tokenize = Tokenize(tokenizer, limits, config.tokenizer_workers)
    schedule = Schedule(_step_limits(config, max_model_len))
    allocate = Allocate(num_blocks, config.block_size, config.max_num_seqs, max_model_len)
    detokenize = Detokenize(tokenizer, tokenizer.decoder, num_slots=config.max_num_seqs, vocab_size=VOCAB_SIZE)
    exit = Outboxes()
    pipeline = build_pipeline(
        intake,
        tokenize,
        schedule,
        allocate,
        Execute(model, device),
        Sample(model, device),
        detokenize,
        exit,
        steps_in_flight=config.steps_in_flight,
    )
    exit.lane = pipeline.lane
    exit.on_start.append(intake.request_started)
    exit.on_end += [intake.request_ended, detokenize.request_ended]
    if env is not None:
        pipeline.use(env)
    return ScriptedPipeline(pipeline, model, intake, tokenize, schedule, allocate, detokenize, exit, config)


def _step_limits(config: EngineConfig, max_model_len: int) -> Limits:
    return Limits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=config.block_size,
        steps_in_flight=config.steps_in_flight,
        enable_chunked_prefill=config.enable_chunked_prefill,
    )


__all__ = ["SMALL", "Any", "Script", "ScriptedPipeline", "scripted_pipeline"]
