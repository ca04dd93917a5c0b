"""Semantic cache: answers a prompt like one that was answered before, without the model.

    millrace serve --stage semantic_cache,threshold=0.9

Two stages share the answers: one before the tokenizer that looks for them, one after the last other stage that keeps
them. An answer is given only to a request of the same owner, cache_salt, adapter and parameters, the seed included,
whose earlier messages are the same, and whose last text is similar: the cosine of two vectors of hashed words and
letter triples is at least `threshold`, the words that both have come in the same order, and numbers, signs and
negations are the same. This is a measure of wording, not of meaning: "big" and "large" differ. Only answers that ended
by themselves are kept, so no unfinished ones.

A client that sends `"metadata": {"cache": "off"}` always asks the model. What a stage after detokenize changes, as the
redactor does, is kept as changed: the second stage stands directly before the exit.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from millrace import PlacedStage, Stage, reply_text
from millrace.runtime.stage import Context, Outlet
from millrace.stages.messages import FinishReason, Request, StepText

Vector = NDArray[np.float32]

NUM_DIMS = 512
NEGATIONS = frozenset({"not", "no", "never", "none", "without", "cannot", "nicht", "kein", "keine", "nie", "ohne"})

_WORD = re.compile(r"\w+(?:'\w+)?")
_PLAIN = re.compile(r"[^\W\d_]+(?:['-][^\W\d_]+)*")  # a word of letters
_MARKS = ".,!?;:()\"'\u201c\u201d\u201e\u00ab\u00bb\u3002\u3001\uff0c\uff1f\uff01\u2026"  # around words


def semantic_cache(threshold: float = 0.9, max_answers: int = 1_000, max_age_s: float = 3_600.0) -> list[PlacedStage]:
    """The two stages, with their places. Of more than `max_answers` the one not used for longest is dropped."""
    if not 0.0 < threshold <= 1.0:
        raise ValueError(f"threshold = {threshold}: must be above 0 and at most 1, which is the same wording")
    if max_answers < 1 or not max_age_s > 0.0:
        raise ValueError(f"max_answers = {max_answers}, max_age_s = {max_age_s}: must be at least 1, and above 0")
    answers = Answers(threshold, max_answers, max_age_s)
    return [
        PlacedStage(CacheLookup(answers), after="intake", name="cache"),
        PlacedStage(CacheFill(answers), before="exit", name="cache_fill"),
    ]


class CacheLookup(Stage[Request, Request]):
    """Answers a request that is like an earlier one."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    async def setup(self, context: Context) -> None:
        self._now = context.env.now
        self._results = context.metrics.counter("lookups", "Lookups by result.", labels=("owner", "result"))

    async def handle(self, batch: Sequence[Request], out: Outlet[Request]) -> None:
        for request in batch:
            question = question_of(request)
            if question is None:
                out.send(request)
                continue
            found = self._answers.find(question, self._now())
            self._results.add(owner=request.owner or "none", result="miss" if found is None else "hit")
            if found is None:
                self._answers.asked[request.request_id] = question
                out.send(request)
            else:
                out.reply(reply_text(request, found.text, found.token_ids))

    def ended(self, request_id: str, cause: str) -> None:
        self._answers.asked.pop(request_id, None)


class CacheFill(Stage[StepText, StepText]):
    """Keeps the answers to the requests that were looked for in vain."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._texts: dict[str, tuple[list[str], list[int]]] = {}  # request id -> texts and tokens so far

    async def setup(self, context: Context) -> None:
        self._context = context
        self._kept = context.metrics.gauge("answers", "Answers in the cache.")

    async def handle(self, batch: Sequence[StepText], out: Outlet[StepText]) -> None:
        for step in batch:
            for row, sequence_id in enumerate(step.sequence_ids):
                self._note(step, row, self._context.find_request(sequence_id))
            out.send(step)

    def ended(self, request_id: str, cause: str) -> None:
        self._texts.pop(request_id, None)

    def _note(self, step: StepText, row: int, request: Request | None) -> None:
        question = None if request is None else self._answers.asked.get(request.request_id)
        if request is None or question is None:
            return
        texts, token_ids = self._texts.setdefault(request.request_id, ([], []))
        texts.append(step.texts[row])
        token_ids.append(step.token_ids[row])
        finish = step.finishes.get(row)
        if finish is not None and finish.reason == FinishReason.STOP and finish.stop_reason is None:
            self._answers.keep(question, "".join(texts), tuple(token_ids), self._context.env.now())
            self._kept.set(len(self._answers))


# -- questions


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """What is asked: `group` must be the same for an answer, `vector` [NUM_DIMS] near, `words` in the same order."""

    group: Hashable
    vector: Vector
    words: tuple[str, ...]


def question_of(request: Request) -> Question | None:
    """The question of a request; None for one that the cache leaves alone."""
    params = request.params
    is_plain = len(request.prompts) == 1 and params.n == 1 and request.parent_id is None and request.pooling is None
    if not is_plain or params.logprobs is not None or params.prompt_logprobs is not None or request.is_warm_up:
        return None
    if request.metadata.get("cache") == "off":
        return None
    prompt = request.prompts[0]
    text, before = prompt.text, repr(prompt.add_special_tokens)
    if prompt.chat is not None:
        *others, last = prompt.chat.messages or ({},)
        text = last.get("content") if last.get("role") == "user" and set(last) <= {"role", "content"} else None
        before = repr(replace(prompt.chat, messages=tuple(others)))
    if not isinstance(text, str) or not text.strip():
        return None
    adapter = "" if request.adapter is None else f"{request.adapter.name} {request.adapter.digest}"
    same = (request.owner, request.cache_salt, adapter, repr(params), before, exact_part(text))
    words = words_of(text)
    return Question(same, vector_of(words), words)


def words_of(text: str) -> tuple[str, ...]:
    """The words of a text in their order."""
    return tuple(_WORD.findall(_plain_quotes(text)))


def exact_part(text: str) -> tuple[str, ...]:
    """What must be the same in two texts: negations, and what is not a word of letters, such as `3`, `-5` or `x<y`."""
    found = []
    for part in _plain_quotes(text).split():
        word = part.strip(_MARKS)
        if word in NEGATIONS or word.endswith("n't"):
            found.append(word)
        elif word and not _PLAIN.fullmatch(word):
            found.append(part.rstrip(_MARKS))
    return tuple(found)


def _plain_quotes(text: str) -> str:
    return text.casefold().replace("\u2019", "'")


def same_order(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether the words that both have come in the same order: a translation to French is not one from French."""
    both = set(one) & set(other)
    return [word for word in one if word in both] == [word for word in other if word in both]


def vector_of(words: Sequence[str]) -> Vector:
    """[NUM_DIMS] of length 1: counts of words, twice, and of their triples of letters, in hashed places."""
    counts: Counter[str] = Counter()
    for word in words:
        counts[f"={word}"] += 2
        padded = f" {word} "
        counts.update(padded[i : i + 3] for i in range(len(padded) - 2))
    vector = np.zeros(NUM_DIMS, np.float32)
    for feature, count in counts.items():
        hashed = crc32(feature.encode())
        vector[hashed % NUM_DIMS] += count if hashed >> 31 else -count
    return vector / max(float(np.linalg.norm(vector)), 1e-9)


# -- answers


@dataclass(slots=True, eq=False)
class Answer:
    """A kept answer."""

    question: Question
    text: str
    token_ids: tuple[int, ...]
    kept_s: float


@dataclass(slots=True)
class Answers:
    """The answers by group, in the order of their last use."""

    threshold: float
    max_answers: int
    max_age_s: float
    asked: dict[str, Question] = field(default_factory=dict)  # request id -> question without an answer yet
    _groups: dict[Hashable, list[Answer]] = field(default_factory=dict)
    _used: OrderedDict[int, tuple[Hashable, Answer]] = field(default_factory=OrderedDict)  # by id(answer)

    def __len__(self) -> int:
        return len(self._used)

    def find(self, question: Question, now_s: float) -> Answer | None:
        """The answer to the most similar question that is similar enough; drops what is too old."""
        group = self._groups.get(question.group, ())
        for answer in [answer for answer in group if now_s - answer.kept_s > self.max_age_s]:
            self._drop(question.group, answer)
        near, nearest = self.threshold - 1e-6, None
        for answer in self._groups.get(question.group, ()):
            similarity = float(answer.question.vector @ question.vector)
            if similarity >= near and same_order(answer.question.words, question.words):
                near, nearest = similarity, answer
        if nearest is None:
            return None
        self._used.move_to_end(id(nearest))
        return nearest

    def keep(self, question: Question, text: str, token_ids: tuple[int, ...], now_s: float) -> None:
        """Keeps an answer."""
        answer = Answer(question, text, token_ids, now_s)
        self._groups.setdefault(question.group, []).append(answer)
        self._used[id(answer)] = (question.group, answer)
        while len(self._used) > self.max_answers:
            self._drop(*next(iter(self._used.values())))

    def _drop(self, group: Hashable, answer: Answer) -> None:
        del self._used[id(answer)]
        self._groups[group] = [one for one in self._groups[group] if one is not answer]
        if not self._groups[group]:
            del self._groups[group]
