"""What a seed draws: sizes, requests, how clients behave, delays and faults. All of a run but the order of events."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import numpy as np

from millrace.stages.config import EngineConfig
from millrace.stages.messages import Prompt, Request
from millrace.stages.params import SamplingParams
from millrace.stages.testing.scripted.script import ALPHABET

POLICIES = ("uniform", "uniform", "pct", "fifo", "starve:schedule", "starve:sample", "starve:exit", "starve:detokenize")
STAGES = ("intake", "tokenize", "schedule", "allocate", "execute", "sample", "detokenize", "exit")
STAGE_FAULTS = tuple(f"{stage}.crash.{when}" for stage in STAGES for when in ("before", "after"))
OTHER_FAULTS = (
    "channel.delay",
    "tokenizer.panic",
    "device.forward",
    "device.sample",
    "device.out_of_memory",
    "device.nan_row",
)
CLOCK_FAULT = "env.wall_clock_jump"  # the wall clock is read once or twice a run, so it jumps for certain or not
COPY_FAULT = "device.copy"  # blocks are copied in few runs
SETTLE_FAULT = "device.settle"  # of an asynchronous device alone
THREAD_FAULT = "thread.start"  # passed a few times a run, the first time before any request: so not in many runs
FAULTS = (*STAGE_FAULTS, *OTHER_FAULTS, CLOCK_FAULT, COPY_FAULT, THREAD_FAULT)


@dataclass(frozen=True)
class Client:
    """One request and how its client behaves."""

    request: Request
    arrival_s: float
    waits_at_door: bool = True
    deadline_s: float | None = None
    gives_up_s: float | None = None  # after this long it goes away, wherever its request is
    gives_up_turns: int | None = None  # the same, after this many turns of the loop: in the middle of other work
    leaves_after: int | None = None  # tokens
    pause_s: float = 0.0  # between two reads
    stalls: bool = False  # reads nothing until all others have ended


@dataclass(frozen=True)
class Setup:
    """All of a run that its seed draws, but the order of events."""

    seed: int
    policy: str
    config: EngineConfig
    eos_probability: float
    period: int | None  # of answers that repeat themselves
    capacities: tuple[int, ...]  # of the edges that wait, in their order; the last is the entry's
    max_waiting: int  # prompts inside schedule
    device_delay_s: float
    tokenize_delay_s: float
    faults: dict[str, float]
    clients: tuple[Client, ...]
    digest_bits: int  # of the prefix cache's keys: few, so that they collide
    cut_probability: float  # at each call of schedule: that three in ten of the live requests are cancelled together
    ends: str  # "all": when every client is served; "drain" or "stop": in the middle
    ends_at_s: float
    short_length: int = 0  # tokens beyond which a sequence has other keys; 0: none has
    woken_at_once: int | None = None  # stages woken per loop callback, as in a process; None: each in its own
    is_async: bool = False  # the device runs asynchronously, on streams


def draw_setup(seed: int) -> Setup:
    """The run of `seed`."""
    dice = Random(f"setup/{seed}")
    max_model_len = dice.choice([16, 32, 48])
    block_size = dice.choice([1, 2, 4, 8])
    blocks_per_sequence = -(-max_model_len // block_size)
    max_num_seqs = dice.choice([1, 2, 3, 4, 8])
    is_chunked = dice.random() < 0.7
    smallest_budget = max_num_seqs if is_chunked else max(max_num_seqs, max_model_len)
    config = EngineConfig(
        max_model_len=max_model_len,
        block_size=block_size,
        num_gpu_blocks=int(blocks_per_sequence * dice.choice([1.0, 1.0, 1.3, 2.0, 4.0])) + dice.randrange(2),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=smallest_budget + dice.choice([0, 1, 7, 40]),
        enable_chunked_prefill=is_chunked,
        itl_target_ms=Random(f"gap/{seed}").choice([0.0, 0.0, 0.0, 1.0, 200.0]) if is_chunked else 0.0,
        steps_in_flight=dice.choice([1, 2, 2, 4]),
        enable_prefix_caching=dice.random() < 0.85,
        max_unread_tokens=Random(f"unread/{seed}").choice([1, 3, 256]),
        max_parked_s=Random(f"parked/{seed}").choice([1.0, 30.0, 1e6]),
        scheduler=Random(f"policy/{seed}").choice(["priority", "priority", "fifo"]),
        priority_ageing_s=None,
        num_cpu_blocks=Random(f"swap/{seed}").choice([0, 3, 10, 1000, 1000]),
        max_admitted_requests=dice.choice([4] + [1000] * 7),
        max_waiting_requests=dice.choice([2] + [1000] * 7),
        tokenizer_workers=dice.choice([1, 2]),
        speculation=Random(f"drafts/{seed}").choice(["off", "ngram", "ngram"]),
        num_speculative_tokens=Random(f"drafted/{seed}").choice([1, 7, 15, 31]),
        prompt_lookup_max=Random(f"lookup/{seed}").choice([1, 1, 3]),
        prompt_lookup_min=1,
    )
    is_tight = Random(f"tight/{seed}").random() < 0.3  # many at once, in hardly more memory than one needs
    if is_tight:
        config = replace(
            config,
            num_gpu_blocks=int(1.3 * blocks_per_sequence) + 1,
            max_num_seqs=8,
            max_num_batched_tokens=max(8, config.max_num_batched_tokens),
        )
    beginning = [dice.choice(ALPHABET) for _ in range(max_model_len)] if dice.random() < 0.6 else []
    num_clients = dice.choice([5, 6, 8, 16]) if dice.random() < 0.96 else dice.randrange(50, 200)
    duration_s = dice.choice([0.001, 0.2, 5.0])
    return Setup(
        seed=seed,
        policy=dice.choice(POLICIES),
        config=config,
        eos_probability=dice.choice([0.0, 0.01, 0.2]) * (not is_tight),
        period=Random(f"period/{seed}").choice([None, 1, 3, 5]),
        capacities=tuple(dice.choice([1, 1, 2, 5]) for _ in range(5)),
        max_waiting=dice.choice([1, 1, 4, 512]),
        device_delay_s=dice.choice([0.0001, 0.01, 0.5]),
        tokenize_delay_s=dice.choice([0.0001, 0.05]),
        faults=_draw_faults(dice)
        | ({CLOCK_FAULT: 1.0} if Random(f"clock/{seed}").random() < 0.1 else {})
        | ({COPY_FAULT: 0.3} if Random(f"copy/{seed}").random() < 0.1 else {})
        | ({THREAD_FAULT: 0.5} if Random(f"thread/{seed}").random() < 0.08 else {}),
        clients=tuple(_draw_client(dice, i, duration_s, max_model_len, beginning) for i in range(num_clients)),
        digest_bits=dice.choice([256, 256, 256, 8, 1]),
        cut_probability=dice.choice([0.0, 0.0, 0.02, 0.2]),
        ends=dice.choice(["all"] * 8 + ["drain", "stop"]),
        ends_at_s=duration_s * dice.random(),
        short_length=Random(f"keys/{seed}").choice([1, 5, max_model_len // 2]) if seed % 7 in (1, 5) else 0,
        woken_at_once=Random(f"bells/{seed}").choice([None, None, None, 1, 2, 8]),
    )


def in_lanes(setup: Setup, num_lanes: int) -> Setup:
    """The same run with decoding rows in lanes, and one more step in flight than these."""
    return replace(setup, config=replace(setup.config, pipeline_parallel_size=num_lanes, steps_in_flight=1))


def on_streams(setup: Setup, steps_in_flight: int) -> Setup:
    """The same run on an asynchronous device with this many steps in flight, and drafts in some seeds."""
    has_drafts = setup.seed % 7 in (3, 5)
    config = replace(setup.config, steps_in_flight=steps_in_flight, speculation="ngram" if has_drafts else "off")
    faults = setup.faults | ({SETTLE_FAULT: 0.05} if Random(f"settle/{setup.seed}").random() < 0.1 else {})
    period = setup.period or 2 if has_drafts else None
    setup = replace(setup, config=config, period=period, faults=faults, is_async=True)
    return _with_failing_copies(setup) if Random(f"copies/{setup.seed}").random() < 0.15 else setup


def _with_failing_copies(setup: Setup) -> Setup:
    """In hardly more memory than one needs, and copies to and from a small host pool fail. A step that stops half
    submitted must not be reported before the device has finished that half: little else shows it."""
    blocks_per_sequence = -(-setup.config.max_model_len // setup.config.block_size)
    config = replace(
        setup.config,
        num_gpu_blocks=int(1.3 * blocks_per_sequence) + 1,
        num_cpu_blocks=10,
        max_num_seqs=8,
        max_num_batched_tokens=max(8, setup.config.max_num_batched_tokens, setup.config.max_model_len),
    )
    return replace(setup, config=config, faults={"device.copy": 0.3}, eos_probability=0.0)


def _draw_faults(dice: Random) -> dict[str, float]:
    """No faults in every third run; else a few points, each with its own probability per pass."""
    if dice.random() < 0.33:
        return {}
    names = dice.sample(STAGE_FAULTS + OTHER_FAULTS, dice.choice([1, 2, 4, 8]))
    return {name: dice.choice([0.003, 0.02, 0.3]) for name in names}


def _draw_client(dice: Random, i: int, duration_s: float, max_model_len: int, beginning: list[int]) -> Client:
    """`beginning`: tokens that many prompts of the run begin with."""
    num_prompts = 2 if dice.random() < 0.1 else 1
    longest = 0
    prompts = []
    for _ in range(num_prompts):
        ids = [dice.choice(ALPHABET) for _ in range(dice.choice([1, 2, 5, max_model_len // 2, max_model_len - 2]))]
        num_common = dice.randrange(len(ids) + 1) if beginning and dice.random() < 0.8 else 0
        ids[:num_common] = beginning[:num_common]
        longest = max(longest, len(ids))
        if dice.random() < 0.5:
            prompts.append(Prompt(token_ids=np.array(ids, np.int32)))
        else:
            prompts.append(Prompt(text=bytes(ids).decode("latin-1").replace("Ã", "x").replace("©", "y")))
    params = _draw_params(dice, max_model_len - longest)
    client = Client(
        request=Request(
            f"r{i}",
            tuple(prompts),
            params,
            cache_salt=dice.choice(["", "", "", "a"]),
            priority=dice.choice([0, 0, 0, 0, -1, 3]),
        ),
        arrival_s=duration_s * dice.choice([0.0, 0.0, 0.5, dice.random()]),
        waits_at_door=dice.random() < 0.8,
        deadline_s=dice.choice([0.01, 1.0, 10.0]) if dice.random() < 0.15 else None,
    )
    manner = dice.random()
    if manner < 0.08:
        return replace(client, gives_up_s=dice.choice([0.0, 0.001, 0.1, 2.0]) * dice.random())
    if manner < 0.2:
        return replace(client, gives_up_turns=dice.randrange(25))
    if manner < 0.28:
        return replace(client, leaves_after=dice.randrange(1, 8))
    if manner < 0.38:
        return replace(client, pause_s=dice.choice([0.01, 1.0]))
    return replace(client, stalls=manner < 0.45)


def _draw_params(dice: Random, room: int) -> SamplingParams:
    max_tokens = min(room, dice.choice([1, 2, dice.randrange(1, room + 1), room, room])) if room > 1 else 1
    has_stop = dice.random() < 0.25
    return SamplingParams(
        n=dice.choice([1, 1, 1, 2, 4]),
        max_tokens=None if dice.random() < 0.1 else max_tokens,
        min_tokens=0 if has_stop else dice.choice([0, 0, min(3, max_tokens)]),
        temperature=dice.choice([0.0, 1.0]),
        seed=dice.randrange(1000),
        stop=tuple(dice.sample(["e", "th", " a", "o.", "xq", "\ufffd"], dice.choice([1, 3]))) if has_stop else (),
        stop_token_ids=(dice.choice(ALPHABET),) if dice.random() < 0.1 else (),
        include_stop_str_in_output=dice.random() < 0.2,
        ignore_eos=dice.random() < 0.2,
        logprobs=2 if dice.random() < 0.1 else None,
    )
