"""The model runner and the execute stage: a grant becomes the decoder's inputs, and steps stay in order."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest
import torch

from millrace.model.decoder.kv_cache import KVCache
from millrace.model.decoder.step_inputs import StepInputs
from millrace.runtime.env.env import Env
from millrace.runtime.graph import Port
from millrace.runtime.pipeline import Pipeline
from millrace.runtime.simulation.testing import sim_test
from millrace.stages.device.arrays import Array, arrays_of
from millrace.stages.device.device import Device
from millrace.stages.execute.model_runner import ModelRunner
from millrace.stages.execute.stage import Execute
from millrace.stages.messages import BlockCopy, Direction, Drafts, StepGrant
from millrace.stages.sample.sampler import Sampler
from tests.model.checkpoints import make_checkpoint
from tests.model.stepping import greedy, load_decoder
from tests.stages.grants import grant, ints, started

BLOCK_SIZE = 4


class Cache:
    block_size = BLOCK_SIZE
    blocks_of_kinds = (64,)


class Recorder:
    """A decoder that keeps what it was given and answers with each row's number."""

    def __init__(self) -> None:
        self.inputs: list[StepInputs] = []

    def forward(self, inputs: StepInputs, cache: Cache) -> Array:
        self.inputs.append(inputs)
        return arrays_of(inputs.logits_rows).floats(inputs.logits_rows[:, None])


Make = Callable[[], tuple[ModelRunner, Recorder]]


@pytest.fixture(params=["numpy", "torch"])
def make(request: pytest.FixtureRequest) -> Make:
    """A runner of 6 slots, on arrays of either kind; the last token of slot s is 100 + s."""

    def make() -> tuple[ModelRunner, Recorder]:
        decoder, last_tokens = Recorder(), np.arange(100, 106)
        return ModelRunner(decoder, Cache(), torch.from_numpy(last_tokens) if torches else last_tokens, 5), decoder

    torches = request.param == "torch"
    return make


def table(slot: int, *blocks: int) -> list[tuple[int, int, int]]:
    return [(slot, place, block) for place, block in enumerate(blocks)]


def tokens_of(inputs: StepInputs, row: int) -> list[tuple[int, int, int]]:
    """(id, position, place in the cache) of each token of a row."""
    start, end = inputs.query_starts[row : row + 2].tolist()
    columns = (inputs.input_ids, inputs.positions, inputs.slot_mapping)
    return list(zip(*(column[start:end].tolist() for column in columns), strict=True))


def test_decoding_rows_read_their_newest_token_and_write_behind_their_last(make: Make):
    runner, decoder = make()
    news = [started(2, (1, 2, 3)), started(0, (7,) * 9)]
    tables = table(2, 9) + table(0, 3, 1, 4)
    runner.forward(grant([(2, 3, 1, True), (0, 9, 1, True)], started=news, tables=tables))
    (inputs,) = decoder.inputs
    assert inputs.is_decode and inputs.num_decode == 2
    assert tokens_of(inputs, 0) == [(102, 3, 9 * BLOCK_SIZE + 3)]
    assert tokens_of(inputs, 1) == [(100, 9, 4 * BLOCK_SIZE + 1)]
    assert inputs.block_tables.tolist() == [[9, 0, 0], [3, 1, 4]]
    assert inputs.lengths.tolist() == [4, 10]
    assert inputs.logits_rows.tolist() == [0, 1]


def test_a_chunk_of_a_prompt_reads_what_came_with_the_sequence(make: Make):
    runner, decoder = make()
    news, tables = [started(1, (11, 12, 13, 14, 15), (16, 17))], table(1, 8, 2)
    runner.forward(grant([(1, 0, 4, False)], started=news, tables=tables))
    runner.forward(grant([(1, 4, 3, True)]))
    runner.forward(grant([(1, 7, 1, True)]))
    first, second, third = decoder.inputs
    assert tokens_of(first, 0) == [(11, 0, 32), (12, 1, 33), (13, 2, 34), (14, 3, 35)]
    assert first.logits_rows.tolist() == [] and first.num_decode == 0 and not first.is_decode
    assert tokens_of(second, 0) == [(15, 4, 8), (16, 5, 9), (17, 6, 10)]
    assert second.logits_rows.tolist() == [2] and second.lengths.tolist() == [7]
    assert tokens_of(third, 0) == [(101, 7, 11)]


def test_single_tokens_come_first_and_logits_keep_the_grants_order(make: Make):
    runner, decoder = make()
    news = [started(slot, range(10, 16)) for slot in (0, 1, 2, 3)]
    tables = [entry for slot in range(4) for entry in table(slot, 2 * slot, 2 * slot + 1)]
    rows = [(0, 0, 3, False), (1, 6, 1, True), (2, 2, 4, True), (3, 5, 1, True)]
    logits = runner.forward(grant(rows, started=news, tables=tables))
    (inputs,) = decoder.inputs
    assert inputs.num_decode == 2 and inputs.query_starts.tolist() == [0, 1, 2, 5, 9]
    assert tokens_of(inputs, 0) == [(101, 6, 14)]  # generated
    assert tokens_of(inputs, 1) == [(15, 5, 29)]  # a prompt's last token, alone in its chunk
    assert [token for token, _, _ in tokens_of(inputs, 2)] == [10, 11, 12]
    assert [token for token, _, _ in tokens_of(inputs, 3)] == [12, 13, 14, 15]
    assert logits[:, 0].tolist() == [0, 8, 1]  # rows 1, 2 and 3 of the grant


def test_a_slot_that_is_given_again_forgets_its_past(make: Make):
    runner, decoder = make()
    runner.forward(grant([(0, 0, 2, True)], started=[started(0, (1, 2))], tables=table(0, 3)))
    runner.forward(grant([(0, 0, 1, True)], started=[started(0, (9,))], tables=table(0, 5)))
    assert tokens_of(decoder.inputs[1], 0) == [(9, 0, 20)]
    assert decoder.inputs[1].block_tables.tolist() == [[5]]
    runner.forward(grant([(0, 1, 1, True)]))
    assert tokens_of(decoder.inputs[2], 0) == [(100, 1, 21)]  # generated, though the one before knew two tokens


def test_news_of_a_step_that_fails_are_known_to_the_next(make: Make):
    runner, decoder = make()
    decoder.forward = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        runner.forward(grant([(4, 0, 1, True)], started=[started(4, (5, 6))], tables=table(4, 1)))
    recorder = runner.decoder = Recorder()
    runner.forward(grant([(4, 0, 2, True)]))
    assert tokens_of(recorder.inputs[0], 0) == [(5, 0, 4), (6, 1, 5)]


def test_a_random_schedule_reads_and_writes_as_a_plain_reading_says(make: Make):
    rng = np.random.default_rng(1)
    runner, decoder = make()
    prompts = [rng.integers(0, 50, rng.integers(1, 12)).tolist() for _ in range(6)]
    blocks = rng.permutation(30).reshape(6, 5)
    done, step = [0] * 6, 0
    while min(done[slot] - len(prompts[slot]) for slot in range(6)) < 3:
        rows, news, tables = [], [], []
        for slot in rng.permutation(6).tolist()[: rng.integers(1, 7)]:
            left = len(prompts[slot]) - done[slot]
            if done[slot] == 0:
                news.append(started(slot, prompts[slot]))
                tables += table(slot, *blocks[slot].tolist())
            count = int(rng.integers(1, left + 1)) if left > 0 else 1
            if done[slot] + count <= 20:
                rows.append((slot, done[slot], count, left <= count))
        if not rows:
            continue
        logits = runner.forward(grant(rows, step=step, started=news, tables=tables))
        inputs, step = decoder.inputs[-1], step + 1
        assert (np.diff(inputs.query_starts)[: inputs.num_decode] == 1).all()
        by_row = {int(inputs.block_tables[row, 0]): tokens_of(inputs, row) for row in range(len(rows))}
        sampled = iter(np.asarray(logits)[:, 0].astype(int).tolist())
        for slot, start, count, is_sampled in rows:
            expected = [
                (
                    prompts[slot][at] if at < len(prompts[slot]) else 100 + slot,
                    at,
                    int(blocks[slot][at // BLOCK_SIZE]) * BLOCK_SIZE + at % BLOCK_SIZE,
                )
                for at in range(start, start + count)
            ]
            assert by_row[int(blocks[slot][0])] == expected
            if is_sampled:
                assert int(inputs.slot_mapping[next(sampled)]) == expected[-1][2]
            done[slot] = start + count
        assert next(sampled, None) is None


def test_a_grant_of_copies_alone_moves_blocks_to_the_host_and_back_and_runs_no_model(tmp_path):
    make_checkpoint("llama", tmp_path, has_tokenizer=False)
    decoder = load_decoder(tmp_path)
    cache = KVCache(decoder.spec, 4, 16, decoder.dtype, decoder.device)
    cache.data.copy_(torch.randn_like(cache.data))
    before = [cache.data.select(3, block).clone() for block in range(4)]
    runner = ModelRunner(decoder, cache, torch.zeros(2, dtype=torch.int64), 4, num_host_blocks=3)
    out = BlockCopy(Direction.OUT, ints(3, 1), ints(0, 2))
    assert runner.forward(replace(grant([]), copies=(out,))).shape == (0, 0)
    cache.data.zero_()
    back = BlockCopy(Direction.IN, ints(2, 0), ints(0, 2))
    runner.forward(replace(grant([], step=1), copies=(back,)))
    assert torch.equal(cache.data.select(3, 0), before[1]) and torch.equal(cache.data.select(3, 2), before[3])
    assert not cache.data.select(3, 1).any() and not cache.data.select(3, 3).any()


# -- with a real decoder


@pytest.mark.slow
def test_runner_and_sampler_generate_what_the_decoder_generates_by_hand(tmp_path):
    """Chunked prompts beside decode rows, a preemption in the middle, and steps sampled before the host reads them."""
    make_checkpoint("llama", tmp_path, has_tokenizer=False)
    decoder = load_decoder(tmp_path)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, decoder.spec.vocab_size, length).tolist() for length in (1, 15, 16, 33)]
    expected = [sequence.generated for sequence in greedy(decoder, prompts, 10)]
    cache = KVCache(decoder.spec, 24, 16, decoder.dtype, decoder.device)
    last_tokens = torch.zeros(4, dtype=torch.int64)
    runner, sampler = ModelRunner(decoder, cache, last_tokens, 4), Sampler(last_tokens, decoder.spec.vocab_size, 64)
    blocks = rng.permutation(24).reshape(6, 4)
    answers: list[list[int]] = [[] for _ in prompts]
    computed, owner = [0] * 4, [0, 1, 2, 3]  # tokens in the cache; rows of `blocks`
    for step in range(40):
        if step == 7:
            computed[2], owner[2] = 0, 5  # preempted: from now on in other blocks, computed anew
        rows, news, tables = [], [], []
        for slot, prompt in enumerate(prompts):
            known = len(prompt) + len(answers[slot])
            if len(answers[slot]) == 10:
                continue
            if computed[slot] == 0:
                news.append(started(slot, prompt, answers[slot]))
                tables += table(slot, *blocks[owner[slot]].tolist())
            count = min(known - computed[slot], 9)
            rows.append((slot, computed[slot], count, computed[slot] + count == known))
            computed[slot] += count
        if not rows:
            break
        order = rng.permutation(len(rows)).tolist()
        this = grant([rows[i] for i in order], step=step, started=news, tables=tables)
        tokens = sampler.sample(this, runner.forward(this))
        for slot, token in zip(tokens.slots.tolist(), tokens.token_ids.tolist(), strict=True):
            answers[slot].append(token)
    assert answers == expected


# -- the stage


class Scripted:
    """A model whose logits are a word, and that fails in some steps."""

    def __init__(self, fails: Sequence[int] = ()) -> None:
        self.fails = fails
        self.ran: list[int] = []

    def forward(self, grant: StepGrant) -> str:
        self.ran.append(grant.step)
        if grant.step in self.fails:
            raise MemoryError(f"no memory in step {grant.step}")
        return f"logits {grant.step}"


async def run_alone(
    env: Env, runner: Scripted, generations: Sequence[int], enter: Callable[[], object] | None = None
) -> list[str]:
    """The results of the execute stage alone, for steps from 5 on, in the order in which they left."""
    pipeline = Pipeline()
    pipeline.add(Execute(runner, Device(enter)))
    pipeline.entry = Port("execute", "in")
    pipeline.open_ports = {Port("execute", "out"), Port("execute", "rates")}
    pipeline.use(env)
    async with pipeline:
        for step, generation in enumerate(generations, 5):
            await pipeline.channel("execute.in").send(grant([(0, 0, 1, True)], step=step, generation=generation))
        found: list[str] = []
        async with aclosing(aiter(pipeline.channel("execute.out"))) as items:
            for step in range(5, 5 + len(generations)):
                item = await anext(items)
                assert item.grant.step == step
                try:
                    found.append(await item.logits)
                except Exception as error:
                    found.append(type(error).__name__)
        assert pipeline.health.is_ready
    return found


@sim_test(seeds=12)
async def test_a_slice_that_ends_at_the_logits_runs_step_after_step(env):
    assert await run_alone(env, Scripted(), [0, 0, 0]) == ["logits 5", "logits 6", "logits 7"]


@sim_test(seeds=12)
async def test_steps_behind_a_failed_one_are_not_run_until_a_higher_generation_comes(env):
    runner = Scripted(fails=[6])
    found = await run_alone(env, runner, [3, 3, 3, 2, 4, 4])
    assert found == ["logits 5", "MemoryError", "StepSkipped", "StepSkipped", "logits 9", "logits 10"]
    assert runner.ran == [5, 6, 9, 10]


@sim_test(seeds=12, fault_names={"execute.crash.before": 0.4, "execute.crash.after": 0.4})
async def test_each_grant_leaves_once_and_in_order_whatever_crashes(env):
    found = await run_alone(env, Scripted(), list(range(4)))
    assert len(found) == 4 and all(end in (f"logits {step}", "InjectedCrash") for step, end in enumerate(found, 5))
    assert found.count("InjectedCrash") == 0 or env.faults.fired["execute.crash.before"] > 0


@pytest.mark.slow
def test_the_stages_need_no_torch():
    names = (
        "execute.stage",
        "sample.stage",
        "device.device",
        "messages",
        "sample.slot_params",
        "execute.model_runner",
        "sample.sampler",
        "device.pooler",
        "device.scored_prompts",
    )
    code = f"import sys\nfor name in {names}: __import__('millrace.stages.' + name)\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_drafts_stand_behind_the_newest_token_and_each_has_logits(make: Make):
    runner, decoder = make()
    news = [started(slot, (1, 2, 3)) for slot in (0, 1, 2)]
    runner.forward(grant([(s, 0, 3, True) for s in (0, 1, 2)], started=news, tables=table(0, 3) + table(1, 4, 5)))
    drafts = Drafts(ints(2, 0, 0), np.array([41, 42]))
    runner.forward(
        replace(grant([(0, 3, 3, True), (1, 3, 1, True), (2, 0, 2, False)], started=news[2:]), drafts=drafts)
    )
    inputs = decoder.inputs[1]
    assert inputs.num_decode == 1 and inputs.query_starts.tolist() == [0, 1, 4, 6]
    assert [token for token, _, _ in tokens_of(inputs, 0)] == [101]
    assert [(token, position) for token, position, _ in tokens_of(inputs, 1)] == [(100, 3), (41, 4), (42, 5)]
    assert [token for token, _, _ in tokens_of(inputs, 2)] == [1, 2]
    assert inputs.logits_rows.tolist() == [1, 2, 3, 0]  # in the order of the grant
    assert inputs.lengths.tolist() == [4, 6, 2]


@sim_test()
async def test_a_device_thread_that_could_not_take_its_place_runs_no_step(env: Env):
    def enter() -> None:
        raise OSError("no such stream")

    runner = Scripted()
    assert await run_alone(env, runner, [0, 1], enter) == ["OSError", "OSError"] and not runner.ran
