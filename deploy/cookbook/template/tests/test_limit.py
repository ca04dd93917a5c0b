"""Limit alone, and in an engine without a model."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from my_stages.limit import Limit

from millrace import PlacedStage, SamplingParams
from millrace.stages.errors import Refused
from millrace.stages.messages import TokenRequest
from millrace.stages.testing import conformance, scripted_engine


def token_request(request_id: str, i: int) -> TokenRequest:
    return TokenRequest(request_id, 0, np.arange(8, dtype=np.int32), SamplingParams(), first_sequence_id=i)


def test_limit_keeps_the_promises_of_every_stage() -> None:
    conformance(lambda: Limit(most=1_000), token_request, seeds=2)


def test_a_prompt_that_is_too_long_is_refused_and_others_are_answered() -> None:
    async def main() -> None:
        async with scripted_engine(answer="Hello", stages=[PlacedStage(Limit(most=4), after="tokenize")]) as engine:
            outputs = [output async for output in engine.generate("four", output_kind="final")]
            assert outputs[-1].outputs[0].text == "Hello"
            with pytest.raises(Refused, match="11 prompt tokens with 0 in progress: must be at most 4"):
                async for _ in engine.generate("much longer"):
                    pass

    asyncio.run(main())
