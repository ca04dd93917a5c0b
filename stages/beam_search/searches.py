"""Runs beam searches: each step is one request, with one prompt per live beam.

The prefix cache shares the common tokens of the beams, and copies the block in which they diverge. So a step computes
one token per beam; without the cache it computes every beam whole. `algorithm.py` ranks the beams.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from ...runtime.pipeline import Pipeline
from ..detokenize.answer_text import AnswerText, TextRows
from ..errors import Failed, Refused, field_text
from ..exit.outboxes import Outboxes, RequestOutbox
from ..messages import Begun, FinishReason, Ints, Prompt, Request, TokenLogprobs
from ..params import SamplingParams
from ..request_limits import MAX_SEQUENCES, RequestLimits
from ..tokenize.stage import PromptEncoder, encode_prompt, is_quick
from .algorithm import BeamParams, BeamSearch, CandidateParams, Floats, Hypothesis, num_candidates, refuse_sampling


@dataclass
class BeamSearches:
    """The searches of one engine, one task each.

    To its client a search is an ordinary request, live at the exit from `submit` to its end. All its text comes at the
    end. Admission counts a search once, and its steps keep its place in the queue. The end of a search also ends its
    current step.
    """

    pipeline: Pipeline
    exit: Outboxes
    encoder: PromptEncoder
    limits: RequestLimits
    eos_token_ids: tuple[int, ...]
    make_answer: Callable[[SamplingParams, Ints], AnswerText]  # makes the detokenizer of one answer to a prompt [P]
    admit: Callable[[Request], Awaitable[Request]] | None = (
        None  # waits for the adapter of a request; None: none has one
    )
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)  # by request id

    def submit(self, request: Request, beams: BeamParams, deadline_s: float | None = None) -> RequestOutbox:
        """Starts a search for the `params.n` best answers to each prompt.

        Returns their outbox, best answer first. Raises `Refused` for invalid parameters, ValueError for a request id
        that is in use.
        """
        self._check(request, beams)
        outbox = self.exit.open(request, deadline_s)
        task = asyncio.get_running_loop().create_task(self._run(outbox, beams), name=request.request_id)
        self._tasks[request.request_id] = task
        task.add_done_callback(self._forget)
        return outbox

    def __contains__(self, request_id: str) -> bool:
        """Whether a search of that request id is running."""
        return request_id in self._tasks

    def request_ended(self, outbox: RequestOutbox, cause: str, error: BaseException | None) -> None:
        """Cancels the search of a request that has ended. The exit calls it (`exit.on_end`)."""
        task = self._tasks.get(outbox.request_id)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    def _forget(self, task: asyncio.Task[None]) -> None:
        if self._tasks.get(task.get_name()) is task:  # the id may be in use again
            del self._tasks[task.get_name()]

    async def wait_until_over(self) -> None:
        """Waits until the tasks of all searches are done. End the searches first."""
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _check(self, request: Request, beams: BeamParams) -> None:
        params = request.params
        refuse_sampling(params)
        self.limits.check(request)
        if params.n > beams.width:
            raise Refused(field_text("n", f"must be at most the width of the search, {beams.width}", str(params.n)))
        if len(request.prompts) * beams.width > MAX_SEQUENCES:
            shown = f"{len(request.prompts)} prompts x {beams.width} beams"
            raise Refused(f"{shown}: at most {MAX_SEQUENCES} beams a request", param="width")
        num_ends = len(self._end_ids(params))
        if beams.width + num_ends > self.limits.vocab_size:
            shown = f"{beams.width} beams and {num_ends} ids that end an answer"
            raise Refused(f"{shown}: the vocabulary has only {self.limits.vocab_size} tokens", param="width")

    def _end_ids(self, params: SamplingParams) -> frozenset[int]:
        return frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else self.eos_token_ids)

    # -- a search

    async def _run(self, outbox: RequestOutbox, beams: BeamParams) -> None:
        request = outbox.request
        try:
            if request.adapter is not None and self.admit is not None:
                request = await self.admit(request)
            async with asyncio.TaskGroup() as group:
                prompts = range(len(request.prompts))
                tasks = [group.create_task(self._search(request, index, beams)) for index in prompts]
            await self._deliver(request, [task.result() for task in tasks])
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseExceptionGroup as errors:  # of one prompt's search; the others were cancelled
            self.exit.fail(request.request_id, errors.exceptions[0])
        except BaseException as error:  # a bug: the client gets an error, the log the traceback
            self.exit.fail(request.request_id, error)

    async def _search(self, request: Request, index: int, beams: BeamParams) -> _SearchResult:
        prompt = self.limits.truncate(request.params, await self._encode(request, index))
        params = self.limits.complete_params(request.params, len(prompt), num_prompts=len(request.prompts))
        assert params.max_tokens is not None
        end_ids = self._end_ids(params)
        search = BeamSearch(
            beams,
            prompt,
            params.max_tokens,
            end_ids,
            min_tokens=params.min_tokens,
            num_logprobs=params.logprobs,
            text=_StopText(self.make_answer(params, prompt), 0) if params.stop else None,
        )
        least = num_candidates(beams.width, len(end_ids), has_stops=bool(params.stop))
        step_params = CandidateParams(
            max_tokens=1, temperature=0.0, ignore_eos=True, seed=0, logprobs=max(least, params.logprobs or 0)
        )
        num_cached, began_s = 0, None
        while not search.is_over:
            prompts = tuple(Prompt(token_ids=beam.token_ids) for beam in search.live)
            step_id = f"{request.request_id}/{index}.{search.num_tokens}"
            while step_id in self.exit.live:  # a client has called its request so
                step_id += "'"
            step = replace(
                request,
                request_id=step_id,
                prompts=prompts,
                params=step_params,
                parent_id=request.request_id,
                num_expected_cached=len(search.live[0].token_ids) - 1 if search.num_tokens else 0,
            )
            computed = await self._compute(step)
            if not search.num_tokens:
                num_cached, began_s = computed.num_cached, computed.began_s
            search.step(computed.token_ids, computed.logprobs)
        return _SearchResult(Begun(prompt, num_cached, began_s), params, search.finished[: params.n])

    async def _encode(self, request: Request, index: int) -> Ints:
        prompt, is_cut = request.prompts[index], request.params.truncate_prompt_tokens is not None
        encode = partial(encode_prompt, self.encoder, self.limits, prompt, is_cut=is_cut)
        return encode() if is_quick(prompt) else await self.pipeline.env.run_in_thread(encode)

    async def _compute(self, step: Request) -> _StepResult:
        """Runs one step, of B prompts."""
        outbox: RequestOutbox = await self.pipeline.submit(step, is_part=True)  # type: ignore[assignment]
        rows: dict[int, TokenLogprobs] = {}
        try:
            async for deltas in outbox:
                rows.update((delta.index, delta.logprobs[0]) for delta in deltas if delta.logprobs)
        finally:
            self.exit.end(step.request_id, "cancel")
        if len(rows) < len(step.prompts):
            raise Failed("the model gave no log-probabilities for a step of this search")
        tops = [rows[index].top for index in range(len(step.prompts))]
        token_ids = np.array([[top[0] for top in row] for row in tops], np.int32)
        logprobs = np.array([[top[3] for top in row] for row in tops], np.float32)
        return _StepResult(token_ids, logprobs, outbox.num_cached_tokens, outbox.times.began_s)

    # -- its end

    async def _deliver(self, request: Request, found: list[_SearchResult]) -> None:
        """Delivers all answers at once, which ends the request."""
        rows, begun = TextRows([], [], []), {}
        for index, one in enumerate(found):
            first = request.first_sequence_id + index * request.params.n
            begun[first] = one.begun
            for choice, hypothesis in enumerate(one.hypotheses):
                self._spell(hypothesis, one, first + choice, rows)
                await self.pipeline.env.sleep(0)  # a long answer takes a millisecond
        self.exit.deliver(rows.message(-1, begun))

    def _spell(self, hypothesis: Hypothesis, found: _SearchResult, sequence_id: int, rows: TextRows) -> None:
        """Adds a row for each token of an answer; the last row has its finish."""
        answer, end = self.make_answer(found.params, found.begun.token_ids), hypothesis.finish
        token_ids = hypothesis.beam.token_ids[len(found.begun.token_ids) :].tolist()
        tops = hypothesis.beam.tops or (None,) * len(token_ids)
        now_us = int(self.pipeline.env.now() * 1e6)  # all of it becomes text at once
        # the detokenizer finds a stop string by itself; any other end comes with the last token
        last = FinishReason.NONE if isinstance(end.stop_reason, str) else end.reason
        for place, (token_id, top) in enumerate(zip(token_ids, tops, strict=True)):
            reason = last if place == len(token_ids) - 1 else FinishReason.NONE
            scores = None if top is None else (top, now_us, False)
            text, finish, logprobs = answer.read(token_id, place, reason, scores)
            scored = None if finish is None else replace(finish, score=end.score)
            rows.add(sequence_id, text, token_id, scored, logprobs)


@dataclass(frozen=True, slots=True)
class _StepResult:
    """The candidates of one step of a search."""

    token_ids: Ints  # [B, C] the likeliest next tokens of each prompt
    logprobs: Floats  # [B, C]
    num_cached: int  # prompt tokens that were not computed
    began_s: float | None  # when the device began with the step


@dataclass(frozen=True, slots=True)
class _SearchResult:
    """The result of the search from one prompt."""

    begun: Begun  # of the first step
    params: SamplingParams
    hypotheses: list[Hypothesis]  # best first


@dataclass(frozen=True, slots=True)
class _StopText:
    """The text of a beam, matched against stop strings."""

    answer: AnswerText
    num_tokens: int

    def grown(self, token_id: int) -> tuple[_StopText, str | None]:
        answer = self.answer.fork()
        _, finish, _ = answer.read(token_id, self.num_tokens, FinishReason.NONE, None)
        stop = None if finish is None else finish.stop_reason
        assert stop is None or isinstance(stop, str)
        return _StopText(answer, self.num_tokens + 1), stop
