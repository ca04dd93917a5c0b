"""Intake: which requests are refused before any work, and how many are admitted."""

import numpy as np
import pytest

from millrace.runtime.simulation.run import SimEnv
from millrace.runtime.simulation.testing import sim_test
from millrace.stages.errors import Overloaded, Refused
from millrace.stages.exit.outboxes import Outboxes
from millrace.stages.intake.admission import Admission, EngineQueues
from millrace.stages.intake.stage import Intake
from millrace.stages.messages import ChatPrompt, Prompt, Request
from millrace.stages.params import SamplingParams
from millrace.stages.request_limits import RequestLimits, as_token_ids, estimated_tokens, longest_sequence
from millrace.stages.tokenize.stage import Tokenize
from tests.stages.front import Answer, ByteText, join, request

LIMITS = RequestLimits(vocab_size=257, max_model_len=64)


def refusal(asked: Request) -> Refused:
    with pytest.raises(Refused) as caught:
        LIMITS.check(asked)
    return caught.value


def ids_request(*token_ids: int, **params) -> Request:
    return Request("r", (Prompt(token_ids=np.array(token_ids, np.int32)),), SamplingParams(**params))


@pytest.mark.parametrize("token_id", [-1, 257, 2**31 - 1])
def test_a_prompt_token_outside_the_vocabulary_is_refused_by_name(token_id):
    error = refusal(ids_request(5, token_id))
    assert error.param == "prompt" and str(token_id) in error.message and "256" in error.message


def test_the_last_token_of_the_vocabulary_is_let_in():
    LIMITS.check(ids_request(256, max_tokens=1))


@pytest.mark.parametrize("params", [{"stop_token_ids": (257,)}, {"logit_bias": {257: 1.0}}])
def test_ids_in_parameters_must_be_in_the_vocabulary(params):
    assert refusal(request("hi", **params)).param == next(iter(params))


@pytest.mark.parametrize(
    "asked",
    [
        Request("r", (), SamplingParams()),
        ids_request(),
        Request("r", (Prompt(chat=ChatPrompt(())),), SamplingParams()),
    ],
)
def test_an_empty_prompt_is_refused_as_such(asked):
    assert refusal(asked).code == "empty_prompt"


def test_prompts_and_choices_are_bounded():
    assert refusal(request(*["a"] * 257)).param == "prompt"
    assert refusal(request(*["a"] * 5, n=128)).param == "n"
    LIMITS.check(request(*["a"] * 4, n=128))


def test_a_prompt_of_ids_that_leaves_no_room_for_max_tokens_is_refused_at_the_door():
    LIMITS.check(ids_request(*[1] * 60, max_tokens=4))
    error = refusal(ids_request(*[1] * 60, max_tokens=5))
    assert error.code == "context_length_exceeded"
    assert all(number in error.message for number in ("64", "60", "5"))


def test_no_tokens_at_all_can_be_asked_for():
    LIMITS.check(request("a", max_tokens=0))


def test_log_probabilities_of_prompts_are_refused_by_their_bytes():
    LIMITS.check_prompts(SamplingParams(prompt_logprobs=3), 2**18)
    LIMITS.check_prompts(SamplingParams(logprobs=20), 2**30)
    with pytest.raises(Refused, match=r"prompt_logprobs = 3 of 262145 prompt tokens: .* at most 1048576"):
        LIMITS.check_prompts(SamplingParams(prompt_logprobs=3), 2**18 + 1)


@pytest.mark.parametrize("values", [[1, 1.0], [True], ["1"], [[1]], [-1], [2**31]])
def test_token_ids_are_whole_numbers(values):
    with pytest.raises(Refused):
        as_token_ids(values)


def test_a_pool_holds_a_sequence_of_all_its_blocks():
    assert longest_sequence(num_blocks=4, block_size=16) == 64


def test_the_estimate_counts_every_prompt_and_every_choice():
    assert estimated_tokens(request("a" * 8, "b" * 4, n=3, max_tokens=5), 64) == (2 + 15) + (1 + 15)
    assert estimated_tokens(request("a" * 8, max_tokens=None), 64) == 64


# -- admission


def test_requests_over_the_limit_are_turned_away_and_room_comes_back_with_each_end():
    door = Admission(max_admitted=2, max_waiting=9)
    door.admit("a", 10, 0.0)
    door.admit("b", 10, 0.0)
    with pytest.raises(Overloaded):
        door.admit("c", 10, 0.0)
    door.release("a", 1.0, is_served=True)
    door.release("a", 1.0, is_served=True)
    door.admit("c", 10, 1.0)
    with pytest.raises(Overloaded):
        door.admit("d", 10, 1.0)
    assert door.num_refused == 2


def test_only_those_without_a_token_count_as_waiting():
    door = Admission(max_admitted=9, max_waiting=1)
    door.admit("a", 10, 0.0)
    with pytest.raises(Overloaded) as caught:
        door.admit("b", 10, 0.0)
    assert caught.value.queue_depth == 1
    door.start("a")
    door.start("a")
    door.admit("b", 10, 0.0)
    assert door.num_waiting == 1 and door.num_admitted == 2


@pytest.mark.parametrize(
    ("queues", "reason"),
    [
        (EngineQueues(3, 7, 9.0, has_room=False), "9 requests or more wait in each engine"),
        (EngineQueues(3, 7, 9.0, has_room=True), "shortest queue takes about 9.0 s, too close to max_queue_s = 4"),
        (EngineQueues(3, 7, 3.0, has_room=True), None),
        (None, None),
    ],
)
def test_in_front_of_engines_only_their_shortest_queue_turns_a_request_away(
    queues: EngineQueues | None, reason: str | None
):
    door = Admission(max_admitted=99, max_waiting=9, max_queue_s=4.0)
    door.ask_queues = lambda num_admitted, max_waiting: queues
    if reason is None:
        return door.admit("a", 10, 0.0)
    with pytest.raises(Overloaded, match=reason) as caught:
        door.admit("a", 10, 0.0)
    refused = caught.value
    assert (refused.num_engines, refused.queue_depth, refused.estimated_wait_s) == (3, 7, 9.0)


def test_waiting_requests_over_the_limit_of_one_engine_are_no_overload_of_several():
    door = Admission(max_admitted=99, max_waiting=2)
    door.ask_queues = lambda num_admitted, max_waiting: EngineQueues(2, 1, 0.5, has_room=num_admitted < 4)
    for name in "abcd":
        door.admit(name, 10, 0.0)
    with pytest.raises(Overloaded, match="2 requests or more wait in each engine"):
        door.admit("e", 10, 0.0)


def test_admitting_a_request_again_changes_nothing():
    door = Admission(max_admitted=9, max_waiting=9)
    door.admit("a", 10, 0.0)
    door.admit("a", 10, 0.0)
    door.release("a", 0.0, is_served=False)
    assert (door.num_admitted, door.num_waiting, door.estimate_wait_s()) == (0, 0, 1.0)


def test_the_wait_is_the_queue_over_the_rate_of_service():
    door = Admission(max_admitted=99, max_waiting=99)
    for i in range(20):  # one of 100 tokens a second
        door.admit(f"served{i}", 100, float(i))
        door.start(f"served{i}")
        door.release(f"served{i}", i + 1.0, is_served=True)
    for i in range(5):
        door.admit(f"waiting{i}", 200, 20.0)
    assert door.estimate_wait_s() == door.work_waiting_s() == pytest.approx(10.0, rel=0.01)
    for i in range(5):
        door.start(f"waiting{i}")
    assert (door.estimate_wait_s(), door.work_waiting_s()) == (1.0, 0.0)


def test_until_a_request_was_served_each_waiting_one_counts_as_a_second_of_work():
    door = Admission(max_admitted=9, max_waiting=9)
    assert door.work_waiting_s() == 0.0
    for i in range(3):
        door.admit(f"waiting{i}", 200, 0.0)
    assert door.work_waiting_s() == 3.0


def test_idle_time_does_not_slow_the_measured_rate():
    door = Admission(max_admitted=9, max_waiting=9)
    for start in (0.0, 1_000.0):
        door.admit("a", 100, start)
        door.release("a", start + 1.0, is_served=True)
    door.admit("b", 1_000, 2_000.0)
    assert door.estimate_wait_s() == pytest.approx(10.0, rel=0.05)


def test_cancelled_requests_do_not_count_as_served():
    door = Admission(max_admitted=9, max_waiting=9)
    door.admit("a", 100, 0.0)
    door.release("a", 1.0, is_served=False)
    door.admit("b", 1_000, 1.0)
    assert door.estimate_wait_s() == 1.0


# -- the stage


def front(intake: Intake) -> tuple[Outboxes, object]:
    exit = Outboxes()
    exit.on_start.append(intake.request_started)
    exit.on_end.append(intake.request_ended)
    text = ByteText()
    return exit, join(intake, Tokenize(text, intake.limits, 2), Answer(), exit)


@sim_test(seeds=20)
async def test_every_admitted_request_is_counted_out_again_however_it_ends(env: SimEnv):
    intake = Intake(LIMITS, max_admitted_requests=3, max_waiting_requests=3)
    exit, pipeline = front(intake)
    pipeline.use(env)
    refused = ended = 0
    async with pipeline:
        outboxes = [
            await pipeline.submit(request("hello" * (1 + i % 2), request_id=f"{i}", n=1 + i % 3, max_tokens=5))
            for i in range(12)
        ]
        pipeline.cancel("1")
        for outbox in outboxes:
            try:
                async for _ in outbox:
                    pass
                ended += 1
            except Overloaded as error:
                assert error.queue_depth <= 3
                refused += 1
        assert intake.admission.num_admitted == intake.admission.num_waiting == 0
        assert [d.text async for ds in pipeline.stream(request("again", max_tokens=9)) for d in ds]
    assert refused + ended == 12 and refused == intake.admission.num_refused
    assert not exit.live


@sim_test(seeds=5)
async def test_a_refused_request_never_reaches_the_tokenizer(env: SimEnv):
    class Unreached(ByteText):
        def encode_text(self, text: str) -> list[int]:
            raise AssertionError("tokenized")

    exit = Outboxes()
    pipeline = join(Intake(LIMITS), Tokenize(Unreached(), LIMITS, 2), Answer(), exit)
    pipeline.use(env)
    async with pipeline:
        with pytest.raises(Refused):
            await pipeline.call(request("a", stop_token_ids=(10_000,)))
