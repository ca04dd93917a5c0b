"""The sampler: each row gets what its parameters request, whatever else is in the step."""

import numpy as np
import pytest
import torch

from millrace.stages.messages import FinishReason, Started, StepTokens
from millrace.stages.sample.logits_processor import LogitsProcessor
from millrace.stages.sample.sampler import Sampler
from millrace.stages.sample.token_chooser import MakeTokenChooser, TokenChooser
from tests.stages.grants import decode, grant, started

V = 40
EOS = 39
CHOOSING: MakeTokenChooser = TokenChooser  # `tests/stages/interpreted_choosing.py` has another one


def make(num_slots: int = 4, vocab: int = V, max_model_len: int = 64, eos=(EOS,)) -> Sampler:
    return Sampler(torch.zeros(num_slots, dtype=torch.int64), vocab, max_model_len, eos, chooser=CHOOSING)


def peaks(*token_ids: int, vocab: int = V, height: float = 5.0) -> torch.Tensor:
    """Logits with one row a token, which is the likeliest there."""
    logits = torch.zeros(len(token_ids), vocab)
    logits[torch.arange(len(token_ids)), list(token_ids)] = height
    return logits


def noise(num_rows: int, vocab: int = V, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def one(logits: torch.Tensor, answer=(), prompt=(1, 2, 3), eos=(EOS,), seed: int = 0, **params) -> StepTokens:
    """A single sequence's next token."""
    sampler = make(vocab=logits.shape[1], eos=eos)
    first = started(0, prompt, answer, seed=seed, **params)
    return sampler.sample(decode(0, started=[first]), logits.clone())


# -- rows and slots


def test_rows_carry_slot_sequence_place_and_token():
    sampler = make()
    first = [started(2, answer=(7, 8)), started(0)]
    tokens = sampler.sample(decode(2, 0, step=3, started=first), peaks(5, 6))
    assert tokens.step == 3 and tokens.slots.tolist() == [2, 0]
    assert tokens.sequence_ids.tolist() == [102, 100]
    assert tokens.places.tolist() == [2, 0]
    assert tokens.token_ids.tolist() == [5, 6]
    assert tokens.started == tuple(first)
    assert sampler.last_tokens.tolist() == [6, 0, 5, 0]
    assert sampler.sample(decode(0, 2), peaks(1, 2)).places.tolist() == [1, 3]


def test_a_row_in_the_middle_of_its_prompt_gets_no_token():
    sampler = make()
    chunk = grant([(1, 0, 2, False)], started=[started(1, (4, 5, 6))])
    tokens = sampler.sample(chunk, torch.zeros(0, V))
    assert len(tokens.slots) == 0 and tokens.started[0].slot == 1
    assert sampler.sample(grant([(1, 2, 1, True)]), peaks(9)).places.tolist() == [0]


def test_results_and_scores_of_a_device_count_only_for_rows_that_go_on():
    """The first row had ended before, and the last one's logits held no number: their scores are not read."""
    sampler, read = make(), []

    def read_scores(slots, scores):
        read.extend(zip(slots.tolist(), scores[:, 0].tolist(), strict=True))
        return [f"of {slot}" for slot in slots.tolist()]

    sampler.chooser.read_scores = read_scores
    for slot, logprobs in ((3, 2), (1, None), (0, 2), (2, 2)):
        sampler.start(started(slot, logprobs=logprobs))
    told = np.array([[-1, 6, 7, 0], [FinishReason.NONE, FinishReason.NONE, FinishReason.NONE, FinishReason.ERROR]])
    tokens = sampler.note_tokens(decode(3, 1, 0, 2), told.astype(np.int32), np.array([[30], [10], [0], [20]], np.int32))
    assert tokens.slots.tolist() == [1, 0, 2] and tokens.token_ids.tolist() == [6, 7, 0]
    assert tokens.finishes.tolist() == [FinishReason.NONE, FinishReason.NONE, FinishReason.ERROR]
    assert read == [(0, 0)] and tokens.logprobs == {1: "of 0"}


def test_dtypes_are_those_of_the_messages():
    tokens = one(noise(1), temperature=1.0)
    kinds = (tokens.slots, tokens.sequence_ids, tokens.places, tokens.token_ids, tokens.finishes)
    assert [array.dtype for array in kinds] == [np.intp, np.int64, np.intp, np.intp, np.int8]


# -- seeds


def test_a_seeded_row_draws_the_same_in_any_batch_order_slot_and_after_preemption():
    logits = noise(6)
    params = {"temperature": 1.2, "top_p": 0.9}

    alone = make()
    alone.sample(decode(0, started=[started(0, seed=77, **params)]), logits[:1].clone())
    expected = []
    for i in range(1, 6):
        expected += alone.sample(decode(0), logits[i : i + 1].clone()).token_ids.tolist()

    crowd = make()
    others = [started(0, seed=1, temperature=0.7), started(1, seed=2, top_k=3, temperature=1.0), started(3)]
    first = started(2, seed=77, **params)
    alone_first = crowd.sample(decode(0, 2, 1, 3, started=[*others, first]), logits[[5, 0, 4, 3]].clone()).token_ids[1]
    found = []
    for i in range(1, 3):
        tokens = crowd.sample(decode(3, 1, 2), torch.stack([noise(1)[0], noise(1)[0], logits[i]]))
        found += tokens.token_ids[2:].tolist()
    again = started(1, answer=(int(alone_first), *found), seed=77, **params)  # preempted, and back in another slot
    for i in range(3, 6):
        news = {"started": [again]} if i == 3 else {}
        found += crowd.sample(decode(1, **news), logits[i : i + 1].clone()).token_ids.tolist()
    assert found == expected


def test_seeds_make_choices_of_one_prompt_differ():
    sampler = make(64)
    first = [started(slot, seed=slot, temperature=1.5) for slot in range(64)]
    tokens = sampler.sample(decode(*range(64), started=first), noise(1).repeat(64, 1))
    assert len(set(tokens.token_ids.tolist())) > 5


def test_negative_and_huge_seeds_are_seeds():
    for seed in (-1, -(2**63), 2**63 - 1, 2**64 - 1):
        assert 0 <= one(noise(1), seed=seed, temperature=1.0).token_ids[0] < V


def test_temperature_zero_is_argmax_and_ignores_the_other_three():
    logits = noise(1)
    assert one(logits, top_p=0.1, top_k=3, min_p=0.5).token_ids.tolist() == [int(logits.argmax())]


def test_every_kind_of_row_in_one_step_gets_its_own_treatment():
    kinds = [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 1}, {"logit_bias": {7: 100.0}}, {"logprobs": 2}]
    sampler = make(5)
    first = [started(slot, seed=slot, **kind) for slot, kind in enumerate(kinds)]
    logits = noise(5)
    tokens = sampler.sample(decode(*range(5), started=first), logits.clone())
    likeliest = logits.argmax(-1).tolist()
    assert tokens.token_ids[0] == likeliest[0]
    assert tokens.token_ids[1] == one(logits[1:2], seed=1, temperature=1.0).token_ids[0]
    assert tokens.token_ids[2] == likeliest[2]
    assert tokens.token_ids[3] == 7
    assert tokens.token_ids[4] == likeliest[4] and list(tokens.logprobs) == [4]


# -- edits


class Witness(LogitsProcessor):
    """Records the edited logits, and changes nothing."""

    def process(self, slots, logits) -> None:
        self.seen = logits.clone()


def edits(first: list[Started], logits: torch.Tensor) -> torch.Tensor:
    """Logits as a processor gets them."""
    sampler, witness = make(), Witness()
    sampler.use(witness)
    sampler.sample(decode(*(each.slot for each in first), started=first), logits.clone())
    return witness.seen


def test_presence_and_frequency_count_the_answer_and_repetition_the_prompt_too():
    logits = peaks(1, height=1.0)
    assert one(logits, prompt=(1, 2), presence_penalty=2.0).token_ids[0] == 1
    assert one(logits, prompt=(1, 2), frequency_penalty=2.0).token_ids[0] == 1
    logits[0, 5] = 0.9
    assert one(logits, prompt=(1, 2), repetition_penalty=2.0).token_ids[0] == 5
    assert one(logits, answer=(1,), presence_penalty=0.2).token_ids[0] == 5
    assert one(logits, answer=(1, 1, 1), frequency_penalty=0.04).token_ids[0] == 5
    assert one(logits, answer=(1, 1), frequency_penalty=0.04).token_ids[0] == 1


def test_penalties_count_tokens_as_they_are_generated():
    sampler = make()
    first = [started(0, frequency_penalty=0.5), started(1)]
    logits = peaks(4, 4, height=1.2)
    steps = [sampler.sample(decode(0, 1, started=first), logits.clone())]
    steps += [sampler.sample(decode(0, 1), logits.clone()) for _ in range(3)]
    assert [step.token_ids.tolist() for step in steps] == [[4, 4], [4, 4], [4, 4], [0, 4]]


def test_penalties_come_back_after_a_preemption():
    logits = noise(1)
    params = {"frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.2}
    sampler, news, answer = make(eos=()), {"started": [started(0, **params)]}, []
    for _ in range(8):
        answer += sampler.sample(decode(0, **news), logits.clone()).token_ids.tolist()
        news = {}
    assert len(set(answer)) > 2
    for i in range(8):
        assert one(logits, answer=answer[:i], eos=(), **params).token_ids[0] == answer[i]


def test_all_penalties_together_are_as_written():
    """A plain reading, token by token: repetition, then frequency and presence, then bias."""
    logits, prompt, answer = noise(1, seed=3), (3, 4, 3), (5, 5, 4, 9)
    expected = logits[0].clone()
    for token in {*prompt, *answer}:
        expected[token] = expected[token] * 1.5 if expected[token] < 0 else expected[token] / 1.5
    for token in set(answer):
        expected[token] -= 0.4 * answer.count(token) + 0.6
    for token, bias in {5: 1.25, 0: -3.0}.items():
        expected[token] += bias
    params = {"repetition_penalty": 1.5, "frequency_penalty": 0.4, "presence_penalty": 0.6}
    first = started(1, prompt, answer, logit_bias={5: 1.25, 0: -3.0}, **params)
    edited = edits([started(0), first], torch.cat([noise(1), logits]))
    torch.testing.assert_close(edited[1], expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(edited[0], noise(1)[0], rtol=0, atol=0)


def test_penalties_of_rows_of_different_lengths_do_not_mix():
    logits = noise(3)
    params = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.6}
    lengths = [((3,), ()), ((3, 4, 5, 6), (9,)), ((7, 8), (1, 2, 2, 2, 1, 3))]
    first = [started(slot, prompt, answer, **params) for slot, (prompt, answer) in enumerate(lengths)]
    alone = [edits([each], logits[each.slot : each.slot + 1]) for each in first]
    torch.testing.assert_close(edits(first, logits), torch.cat(alone), rtol=0, atol=0)


def test_bias_can_force_and_forbid_a_token():
    logits = peaks(3)
    assert one(logits, logit_bias={8: 100.0}).token_ids[0] == 8
    assert one(logits, logit_bias={3: -100.0, 10: 1.0}).token_ids[0] == 10


def test_ids_outside_the_vocabulary_do_nothing():
    tokens = one(peaks(3), logit_bias={V: 100.0, 2**31 - 1: 5.0}, stop_token_ids=(V, 10**6), min_tokens=1)
    assert tokens.token_ids[0] == 3 and tokens.finishes[0] == FinishReason.NONE


def test_end_tokens_are_masked_until_min_tokens():
    sampler = make()
    logits = peaks(EOS)
    logits[0, 8], logits[0, 9] = 4.0, 3.0
    first = started(0, min_tokens=2, stop_token_ids=(8,))
    steps = [sampler.sample(decode(0, started=[first]), logits.clone())]
    steps += [sampler.sample(decode(0), logits.clone()) for _ in range(2)]
    assert [int(step.token_ids[0]) for step in steps] == [9, 9, EOS]
    assert [int(step.finishes[0]) for step in steps] == [0, 0, FinishReason.STOP]


# -- ends


def test_eos_ends_with_stop_unless_it_is_ignored():
    assert one(peaks(EOS)).finishes.tolist() == [FinishReason.STOP]
    assert one(peaks(EOS), ignore_eos=True).finishes.tolist() == [FinishReason.NONE]
    assert one(peaks(6), eos=(5, 6)).finishes.tolist() == [FinishReason.STOP]
    assert one(peaks(EOS), eos=()).finishes.tolist() == [FinishReason.NONE]


def test_stop_token_ids_end_with_stop_also_where_eos_is_ignored():
    assert one(peaks(8), stop_token_ids=(7, 8)).finishes.tolist() == [FinishReason.STOP]
    assert one(peaks(9), stop_token_ids=(7, 8)).finishes.tolist() == [FinishReason.NONE]
    assert one(peaks(EOS), stop_token_ids=(EOS,), ignore_eos=True).finishes.tolist() == [FinishReason.STOP]


def test_stop_ids_of_one_row_do_not_end_another_nor_the_next_in_its_slot():
    sampler = make()
    first = [started(0, stop_token_ids=(8,)), started(1)]
    assert sampler.sample(decode(0, 1, started=first), peaks(8, 8)).finishes.tolist() == [FinishReason.STOP, 0]
    assert sampler.sample(decode(0, started=[started(0)]), peaks(8)).finishes.tolist() == [0]


@pytest.mark.parametrize(
    ("answer", "params", "finish"),
    [
        ((), {"max_tokens": 1}, FinishReason.LENGTH),
        ((5,), {"max_tokens": 3}, FinishReason.NONE),
        ((5, 5), {"max_tokens": 3}, FinishReason.LENGTH),
        ((5,) * 59, {}, FinishReason.NONE),  # 3 + 60 tokens, max_model_len is 64
        ((5,) * 60, {}, FinishReason.LENGTH),
        ((5,) * 60, {"max_tokens": 1000}, FinishReason.LENGTH),
    ],
)
def test_length_ends_at_max_tokens_or_where_the_context_is_full(answer, params, finish):
    assert one(peaks(4), answer=answer, **params).finishes.tolist() == [finish]


def test_an_end_token_at_the_last_place_is_a_stop():
    assert one(peaks(EOS), max_tokens=1).finishes.tolist() == [FinishReason.STOP]


def test_an_ended_row_gets_no_tokens_until_its_slot_is_assigned_again():
    sampler = make()
    sampler.sample(decode(0, 1, started=[started(0), started(1)]), peaks(EOS, 4))
    late = sampler.sample(decode(0, 1, step=1), peaks(5, 6))
    assert late.slots.tolist() == [1] and late.token_ids.tolist() == [6] and late.places.tolist() == [1]
    empty = sampler.sample(decode(0, step=2), peaks(5))
    assert len(empty.slots) == 0 and len(empty.token_ids) == 0
    anew = sampler.sample(decode(0, step=3, started=[started(0)]), peaks(5))
    assert anew.slots.tolist() == [0] and anew.places.tolist() == [0]


# -- logits that hold no number


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5}, {"logprobs": 3}])
@pytest.mark.parametrize("vocab", [100, 8193])
@pytest.mark.parametrize("bad", ["one nan", "all nan", "all -inf", "one inf"])
def test_a_row_without_numbers_ends_alone(bad, vocab, params):
    sampler = make(vocab=vocab)
    logits = noise(3, vocab)
    index = vocab - 1 if bad.startswith("one") else slice(None)
    logits[1, index] = {"nan": torch.nan, "-inf": -torch.inf, "inf": torch.inf}[bad.split()[1]]
    clean = noise(3, vocab)
    first = [started(slot, seed=slot, **params) for slot in range(3)]
    tokens = sampler.sample(decode(0, 1, 2, started=first), logits)
    assert tokens.finishes.tolist() == [0, FinishReason.ERROR, 0]
    assert ((tokens.token_ids >= 0) & (tokens.token_ids < vocab)).all()
    assert 1 not in tokens.logprobs
    for row in (0, 2):
        assert tokens.token_ids[row] == one(clean[row : row + 1], seed=row, **params).token_ids[0]
    assert sampler.sample(decode(0, 1), clean[:2].clone()).slots.tolist() == [0]


def test_a_row_in_which_everything_is_forbidden_ends_with_an_error():
    assert one(torch.zeros(1, 2), eos=(0, 1), min_tokens=1).finishes.tolist() == [FinishReason.ERROR]


# -- log-probabilities


def test_logprobs_are_raw_whatever_was_done_to_the_logits():
    logits = noise(1)
    expected = logits.log_softmax(-1)[0]
    params = {"temperature": 0.3, "logit_bias": {4: 100.0}, "repetition_penalty": 2.0, "top_k": 2}
    tokens = one(logits, logprobs=3, **params)
    assert tokens.token_ids.tolist() == [4]
    found = tokens.logprobs[0]
    assert found.chosen == pytest.approx(float(expected[4]), abs=1e-6)
    assert found.token_ids == tuple(expected.topk(3).indices.tolist())
    assert found.rank == 1 + int((expected > expected[4]).sum())


def test_only_rows_that_asked_get_logprobs_and_each_as_many_as_it_asked_for():
    sampler = make()
    first = [started(0, logprobs=0), started(1), started(2, logprobs=20), started(3, logprobs=5)]
    tokens = sampler.sample(decode(3, 1, 0, 2, started=first), noise(4))
    assert {row: len(found.token_ids) for row, found in tokens.logprobs.items()} == {0: 5, 2: 0, 3: 20}
    for row, found in tokens.logprobs.items():
        assert found.rank == 1  # greedy
        assert found.token_ids[:1] in ((), (int(tokens.token_ids[row]),))


def test_more_logprobs_than_tokens_are_all_tokens():
    assert len(one(torch.zeros(1, 3), eos=(), logprobs=20).logprobs[0].token_ids) == 3


# -- other forms of logits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "top_k": 5}, {"presence_penalty": 1.0}, {"logprobs": 1}])
def test_half_precision_logits_do(dtype, params):
    half = noise(1).to(dtype)
    assert one(half, answer=(4,), **params).token_ids[0] == one(half.float(), answer=(4,), **params).token_ids[0]


def test_logits_made_in_inference_mode_can_be_edited():
    with torch.inference_mode():
        logits = noise(1)
    sampler = make()
    assert sampler.sample(decode(0, started=[started(0, logit_bias={3: 100.0})]), logits).token_ids[0] == 3
