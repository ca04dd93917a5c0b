"""Tokens to text: whole characters, each token once, nothing of a stop string."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.runtime.channel import ControlLane
from millrace.runtime.crash_recovery import StageCrashed
from millrace.runtime.simulation.run import SimEnv, run
from millrace.runtime.simulation.testing import sim_test
from millrace.runtime.stage import Context
from millrace.runtime.trace.tracer import Tracer
from millrace.runtime.wakeups import WakeupBatch
from millrace.stages.detokenize.stage import Detokenize
from millrace.stages.detokenize.token_traits import ANY, NOT_PLAIN, token_traits
from millrace.stages.exit.outboxes import RequestOutbox
from millrace.stages.messages import Finish, FinishReason, StepText, TopLogprobs
from tests.stages.front import EOS, ByteText, Collected, request, started, step

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


class Bench:
    """A detokenize stage without a pipeline."""

    def __init__(self, env: SimEnv, text: ByteText | None = None, num_slots: int = 8) -> None:
        text = text or ByteText()
        self.stage = Detokenize(text, text.decoder, num_slots=num_slots, vocab_size=300)
        self.out = Collected()
        self.dead: set[str] = set()
        self.context = Context(
            env, Tracer(enabled=False), 0, ControlLane("none"), lambda r: r not in self.dead, self._escalate
        )

    def _escalate(self, error: BaseException) -> None:
        raise error

    async def __call__(self, *steps) -> dict[int, str]:
        """Reads steps as one batch; the text so far by sequence id."""
        await self.stage.setup(self.context)
        await self.stage.handle(steps, self.out)
        return self.text

    @property
    def text(self) -> dict[int, str]:
        text: dict[int, str] = {}
        for message in self.out.sent:
            for sequence_id, piece in zip(message.sequence_ids, message.texts, strict=True):
                text[sequence_id] = text.get(sequence_id, "") + piece
        return text

    @property
    def last(self) -> StepText:
        return self.out.sent[-1]

    def check_empty(self) -> None:
        assert not self.stage._sequences and not self.stage._begun
        assert (self.stage._sequence_ids == -1).all()


def spell(bench: Bench, slot: int, sequence_id: int, tokens, start: int = 0, first_step: int = 0, finish=LENGTH):
    """Steps of one sequence that end it."""
    last = len(tokens) - 1
    return [
        step(first_step + i, (slot, sequence_id, start + i, token, finish if i == last else FinishReason.NONE))
        for i, token in enumerate(tokens)
    ]


@sim_test(seeds=1)
async def test_plain_tokens_of_many_sequences_become_text_in_one_message_a_step(env: SimEnv):
    bench = Bench(env)
    await bench(step(0, (0, 7, 0, "H"), (3, 9, 0, "y"), starts=[started(0, 7), started(3, 9)]))
    assert {id: len(begun.token_ids) for id, begun in bench.last.begun.items()} == {7: 3, 9: 3}
    await bench(step(1, (0, 7, 1, "i"), (3, 9, 1, "o")))
    assert len(bench.out.sent) == 2 and bench.last.begun == {}
    assert bench.text == {7: "Hi", 9: "yo"}


@sim_test(seeds=1)
async def test_half_a_character_is_held_until_it_is_whole_and_the_table_is_used_again(env: SimEnv):
    bench = Bench(env)
    await bench(step(0, starts=[started(0, 1)]))
    pieces = []
    for place, byte in enumerate("a🙂b".encode()):
        await bench(step(place, (0, 1, place, byte)))
        pieces.append(bench.last.texts[0])
    assert pieces == ["a", "", "", "", "🙂", "b"]
    assert bench.stage._traits_of_slots[0] == NOT_PLAIN


@sim_test(seeds=1)
async def test_the_end_brings_out_what_was_held_back(env: SimEnv):
    bench = Bench(env)
    await bench(step(0, starts=[started(0, 1), started(1, 2, stop=("ab!",))]))
    await bench(*spell(bench, 0, 1, "é".encode()[:1]))
    await bench(*spell(bench, 1, 2, "xab"))
    assert bench.text == {1: "\ufffd", 2: "xab"}
    bench.check_empty()


@sim_test(seeds=1)
async def test_the_token_that_ends_an_answer_is_told_but_not_spelled(env: SimEnv):
    bench = Bench(env)
    starts = [started(0, 1), started(1, 2, stop_token_ids=(33,)), started(2, 3, include_stop_str_in_output=True)]
    await bench(step(0, (0, 1, 0, "a"), (1, 2, 0, "b"), (2, 3, 0, "c"), starts=starts))
    await bench(step(1, (0, 1, 1, EOS, STOP), (1, 2, 1, "!", STOP), (2, 3, 1, "!", STOP)))
    assert bench.text == {1: "a", 2: "b", 3: "c!"}
    assert bench.last.token_ids == [EOS, 33, 33]
    assert bench.last.finishes == {0: Finish(STOP, None), 1: Finish(STOP, 33), 2: Finish(STOP, None)}
    bench.check_empty()


@sim_test(seeds=1)
async def test_a_stop_string_ends_the_answer_and_what_follows_is_dropped(env: SimEnv):
    bench = Bench(env)
    await bench(step(0, starts=[started(0, 1, stop=("END",)), started(1, 2)]))
    for i, (one, other) in enumerate(zip("xENDyy", "abcdef", strict=True)):
        await bench(step(i, (0, 1, i, one), (1, 2, i, other)))
    assert bench.text == {1: "x", 2: "abcdef"}
    finishes = [m.finishes for m in bench.out.sent if m.finishes]
    assert finishes == [{1: Finish(STOP, "END")}]
    assert sum(m.sequence_ids.count(1) for m in bench.out.sent) == 4
    # schedule starts it again, as it did not know yet: no text results
    await bench(step(9, (0, 1, 6, "z"), starts=[started(0, 1, generated=b"xENDyy", stop=("END",))]))
    assert bench.text == {1: "x", 2: "abcdef"}


@sim_test(seeds=1)
async def test_no_stop_string_turns_a_failed_row_into_an_answer(env: SimEnv):
    bench = Bench(env)
    await bench(step(0, starts=[started(0, 1, stop=("\ufffd",)), started(1, 2, stop=("ab!",))]))
    await bench(*spell(bench, 0, 1, [0xC3, 0], finish=FinishReason.ERROR))
    assert bench.last.finishes == {0: Finish(FinishReason.ERROR)} and bench.text[1] == "\ufffd"
    await bench(*spell(bench, 1, 2, "xab!", finish=FinishReason.ERROR))
    assert bench.last.finishes == {0: Finish(FinishReason.ERROR)} and bench.text[2] == "xab"
    bench.check_empty()


@sim_test(seeds=1)
async def test_stop_strings_are_not_looked_for_in_the_first_min_tokens(env: SimEnv):
    bench = Bench(env)
    await bench(step(0, starts=[started(0, 1, stop=("a",), min_tokens=3)]))
    for i, token in enumerate("aabba"):
        await bench(step(i, (0, 1, i, token)))
    assert bench.text == {1: "aabb"} and bench.last.finishes == {0: Finish(STOP, "a")}


@sim_test(seeds=1)
async def test_a_token_seen_before_is_dropped_by_its_place(env: SimEnv):
    bench = Bench(env)
    steps = [step(i, (0, 1, i, c)) for i, c in enumerate("abc")]
    await bench(step(0, starts=[started(0, 1)]), *steps)
    await bench(*steps)
    assert bench.text == {1: "abc"}
    await bench(step(0, starts=[started(0, 1)]), step(3, (0, 1, 2, "c")), step(4, (0, 1, 3, "d")))
    assert bench.text == {1: "abcd"}


@sim_test(seeds=1)
async def test_an_answer_goes_on_in_another_slot_after_a_preemption(env: SimEnv):
    bench = Bench(env)
    half, rest = "é".encode()[:1], "é".encode()[1:]
    await bench(step(0, (0, 1, 0, half[0]), starts=[started(0, 1)]))
    await bench(step(1, (0, 2, 0, "x"), starts=[started(0, 2)]))  # another one takes its slot
    await bench(step(2, (5, 1, 1, rest[0]), (0, 2, 1, "y"), starts=[started(5, 1, generated=half)]))
    assert bench.text == {1: "é", 2: "xy"}
    await bench(step(3, (0, 1, 2, "z"), starts=[started(0, 1, generated=half + rest)]))  # and takes it back
    assert bench.text == {1: "éz", 2: "xy"}


@sim_test(seeds=1)
async def test_nothing_is_kept_of_requests_that_ended(env: SimEnv):
    bench = Bench(env)
    await bench(step(0, (0, 0, 0, "a"), (1, 1, 0, "b"), starts=[started(0, 0), started(1, 1, stop=("x",))]))
    outbox = RequestOutbox(request("p", request_id="r0", n=2), WakeupBatch().wakeup())
    outbox.request = outbox.request.__class__("r0", outbox.request.prompts, outbox.request.params, first_sequence_id=0)
    bench.stage.request_ended(outbox, "cancel", None)
    bench.check_empty()
    bench.dead.add("r0")
    await bench(step(1, (0, 0, 1, "c"), (1, 1, 1, "d"), starts=[started(0, 0, generated=b"a")]))
    assert bench.text == {0: "a", 1: "b"}
    bench.dead.add("r9")
    await bench(step(2, (3, 9, 0, "c"), starts=[started(3, 9)]))
    bench.check_empty()


@sim_test(seeds=1)
async def test_logprobs_spell_the_tokens_and_their_bytes(env: SimEnv):
    bench = Bench(env)
    await bench(step(0, starts=[started(0, 1, logprobs=2)]))
    top = TopLogprobs(-0.5, 1, (ord("a"), 0xC3), (-0.5, -1.5))
    await bench(step(1, (0, 1, 0, "a"), logprobs={0: top}))
    entry = bench.last.logprobs[0]
    assert (entry.token_id, entry.token, entry.token_bytes, entry.logprob, entry.rank) == (97, "a", b"a", -0.5, 1)
    assert entry.top == ((97, "a", b"a", -0.5), (0xC3, "\ufffd", b"\xc3", -1.5))
    spelled = []
    for place, byte in enumerate("é".encode(), 1):
        await bench(step(place, (0, 1, place, byte), logprobs={0: TopLogprobs(-1.0, 3, (), ())}))
        spelled.append((bench.last.logprobs[0].token, bench.last.logprobs[0].token_bytes))
    assert spelled == [("", b"\xc3"), ("é", b"\xa9")]


@sim_test(seeds=1)
async def test_logprobs_say_when_a_token_came_and_whether_it_was_drafted(env: SimEnv):
    bench, top = Bench(env), TopLogprobs(-0.5, 1, (), ())
    await bench(step(0, starts=[started(0, 1, logprobs=0), started(3, 2, logprobs=0)]))
    await env.sleep(0.25)
    rows = [(0, 1, 0, "a"), (0, 1, 1, "b"), (0, 1, 2, "c"), (3, 2, 0, "x")]  # two drafts and their step's own; no draft
    await bench(step(1, *rows, logprobs=dict.fromkeys(range(4), top)))
    entries = [bench.last.logprobs[row] for row in range(4)]
    assert [entry.is_drafted for entry in entries] == [True, True, False, False]
    assert {entry.time_us for entry in entries} == {int(1e6 * env.now())}


@sim_test(seeds=1)
async def test_ids_that_the_tokenizer_does_not_know_have_no_text(env: SimEnv):
    bench = Bench(env)
    await bench(step(0, starts=[started(0, 1, logprobs=1)]))
    await bench(step(1, (0, 1, 0, 299), logprobs={0: TopLogprobs(-1.0, 1, (299,), (-1.0,))}))
    assert bench.text == {1: ""} and bench.last.logprobs[0].token_bytes == b""


class Cursed(ByteText):
    """Its decoders fail on byte 0xFF as Rust code does: not with an `Exception`."""

    def decoder(self, params, prompt=()):
        decoder = super().decoder(params, prompt)
        push = decoder.push

        def fragile(token_id: int) -> str:
            if token_id == 0xFF:
                raise BaseException("panic")
            return push(token_id)

        decoder.push = fragile
        return decoder


@sim_test(seeds=1)
async def test_a_crash_in_one_row_ends_that_request_alone(env: SimEnv):
    bench = Bench(env, Cursed())
    starts = [started(slot, slot, stop=("!",)) for slot in range(3)]
    await bench(step(0, (0, 0, 0, "a"), (1, 1, 0, 0xFF), (2, 2, 0, "c"), starts=starts))
    await bench(step(1, (0, 0, 1, "x"), (1, 1, 1, "y"), (2, 2, 1, "z")))
    assert bench.text == {0: "ax", 2: "cz"}
    ((failed, error),) = bench.out.failed
    assert failed == "r1" and isinstance(error, StageCrashed) and error.code == "detokenizer_error"


@sim_test(seeds=1)
async def test_a_lost_token_ends_its_request_and_is_not_papered_over(env: SimEnv):
    bench = Bench(env)
    await bench(step(0, (0, 0, 0, "a"), (1, 1, 0, "b"), starts=[started(0, 0), started(1, 1)]))
    await bench(step(1, (0, 0, 2, "c"), (1, 1, 1, "d")))
    assert bench.text == {0: "a", 1: "bd"} and [item for item, _ in bench.out.failed] == ["r0"]


def test_a_batch_that_is_read_again_after_a_crash_repeats_and_loses_nothing():
    async def main(env: SimEnv) -> str:
        bench = Bench(env)
        steps = [step(0, starts=[started(0, 1)])] + [step(i, (0, 1, i, c)) for i, c in enumerate("abcdef")]
        await bench(*steps[:3])
        if env.random("test").random() < 0.5:
            await bench.stage.handle(steps[3:], bench.out)
        await bench.stage.recover(steps[3:], RuntimeError("injected"), bench.out)
        return bench.text[1]

    assert {run(main, seed=seed).value for seed in range(8)} == {"abcdef"}


@sim_test(seeds=5)
async def test_the_loop_takes_turns_while_many_slow_rows_are_read(env: SimEnv):
    num_slots = 256
    bench = Bench(env, num_slots=num_slots)
    await bench(step(0, starts=[started(slot, slot, stop=("!",)) for slot in range(num_slots)]))
    before = env.loop.num_callbacks
    await bench(step(1, *[(slot, slot, 0, "!") for slot in range(num_slots)]))
    assert env.loop.num_callbacks - before >= num_slots // 64 - 1


texts = st.text("ab🙂é\n", min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(texts, st.lists(st.text("ab\n", min_size=1, max_size=3), max_size=2)), min_size=1, max_size=4)
)
def test_whatever_the_mixture_each_answer_is_its_own_text_up_to_its_stop(answers):
    def oracle(text: str, stops: list[str]) -> str:
        for end in range(1, len(text) + 1):
            complete = [stop for stop in stops if text[:end].endswith(stop)]
            if complete:
                return text[: end - max(map(len, complete))]
        return text

    async def main(env: SimEnv) -> dict[int, str]:
        bench = Bench(env)
        await bench(step(0, starts=[started(i, i, stop=tuple(stops)) for i, (_, stops) in enumerate(answers)]))
        tokens = [text.encode() for text, _ in answers]
        for place in range(max(map(len, tokens))):
            rows = [
                (i, i, place, t[place], LENGTH if place == len(t) - 1 else FinishReason.NONE)
                for i, t in enumerate(tokens)
                if place < len(t)
            ]
            await bench(step(place, *rows))
        bench.check_empty()
        return bench.text

    assert run(main, seed=1).value == {i: oracle(text, stops) for i, (text, stops) in enumerate(answers)}


@pytest.mark.slow
def test_256_plain_rows_cost_little_more_than_looking_them_up():
    async def main(env: SimEnv) -> float:
        bench = Bench(env, num_slots=256)
        await bench(step(0, starts=[started(slot, slot) for slot in range(256)]))
        steps = [step(place, *[(slot, slot, place, "a") for slot in range(256)]) for place in range(200)]
        began = time.process_time()
        await bench.stage.handle(steps, bench.out)
        return (time.process_time() - began) / len(steps)

    best = min(run(main, seed=0).value for _ in range(3))
    assert best < 400e-6  # 75 us measured on a busy machine


def test_a_token_has_the_classes_of_all_its_characters():
    traits = token_traits(["", "a", "Ab!", "é9", "\n", "b"]).tolist()
    assert traits[0] == ANY
    assert traits[2] & traits[1] & traits[5] == ANY and traits[2] & ~ANY & (traits[1] | traits[5])
    assert len({t for t in traits}) == 6


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(max_size=4), min_size=1, max_size=6), st.characters(exclude_categories=["Cs"]))
def test_a_character_in_a_token_always_shows_in_its_traits(texts, character):
    wanted = token_traits([character])[0] & ~np.uint64(ANY)
    for text, traits in zip(texts, token_traits(texts), strict=True):
        assert character not in text or traits & wanted
