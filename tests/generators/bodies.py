"""Bodies that are right but for one to four fields, sent to a live server.

    python -m tests.generators.bodies --cases 100000

Each is answered with 200 (408 or 504 where it allows itself under a second), or refused with 400 or 404, and the
field that is named is to blame: left out (or put right where it is needed), with the rest as it was, the same refusal
does not come again. What is wrong with a body as a whole (no JSON, a number of 21 digits, too long) names no field.
"""

from __future__ import annotations

import argparse
import http.client
import json
from contextlib import closing
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.deploy.running import Answer, RunningServer
from tests.security.oracle import CHAT, TEXT, base, check_error

COMMON: dict[str, Any] = {
    "model": "scripted",
    "n": 1,
    "max_tokens": 3,
    "min_tokens": 0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "seed": 1,
    "best_of": None,
    "use_beam_search": False,
    "length_penalty": 1.0,
    "early_stopping": False,
    "stop": ["zz"],
    "stop_token_ids": [7],
    "include_stop_str_in_output": False,
    "ignore_eos": False,
    "logit_bias": {"5": 1.0},
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "stream": False,
    "stream_options": None,
    "priority": 0,
    "cache_salt": "salt",
    "request_id": "id",
    "user": "someone",
    "response_format": {"type": "text"},
    "structured_outputs": None,
    "guided_json": None,
    "guided_regex": None,
    "guided_choice": None,
    "guided_grammar": None,
    "allowed_token_ids": None,
    "bad_words": ["zz"],
    "truncate_prompt_tokens": 100,
    "truncation_side": "left",
    "prompt_logprobs": None,
    "return_token_ids": False,
    "return_token_details": False,
    "return_metrics": False,
    "return_progress": False,
    "return_tokens_as_token_ids": False,
    "timeout_s": 60.0,
}
RIGHT: dict[str, dict[str, Any]] = {
    TEXT: {"prompt": "hello", "logprobs": 1, "echo": False} | COMMON,
    CHAT: {
        "messages": [{"role": "user", "content": "hello"}],
        "logprobs": True,
        "top_logprobs": 1,
        "max_completion_tokens": 3,
        "add_generation_prompt": True,
        "continue_final_message": False,
        "chat_template_kwargs": {},
        "documents": [],
        "tools": None,
        "tool_choice": None,
        "parallel_tool_calls": True,
        "reasoning_effort": "low",
        "include_reasoning": True,
        "thinking_budget": None,
        "thinking_token_budget": None,
    }
    | COMMON,
}
NEEDED = {"prompt", "messages"}  # all others can be left out
TOO_LATE = {408: "request_timeout", 504: "deadline_exceeded"}  # before it began, and then
LENGTHS = ("max_tokens", "max_completion_tokens")  # prompt and answer share the context: either can be too long for it

wrong_values = st.one_of(
    st.sampled_from(
        [None, True, False, 0, 1, -1, 2, 0.5, -0.0, 2.0, "", "x", "1", [], {}, [[]], [None], [""], {"": 0}]
    ),
    st.sampled_from([20, 21, 64, 65, 128, 129, 256, 257, 511, 512, 513, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64]),
    st.sampled_from([float("nan"), float("inf"), float("-inf"), 1e308, 5e-324, -1e9, 10**19, 10**20, 10**400]),
    st.sampled_from(["\ud800", "\x00", "a" * 300, "é" * 513, "a" * 20_000, ["a"] * 17, [1] * 200, "😀", "a\r\nb"]),
    st.sampled_from(
        [[{"role": "user", "content": None}], [{"role": "x", "content": "a"}], [{"type": "text"}], [-1, 260]]
    ),
    st.integers(),
    st.floats(),
    st.text(max_size=40),
    st.recursive(st.none() | st.booleans() | st.integers(-9, 999) | st.text(max_size=4), st.lists, max_leaves=5),
    st.dictionaries(st.text(max_size=4), st.integers(-200, 200), max_size=3),
)


@st.composite
def mutated(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A path, and a body with 1 to 4 fields changed."""
    path = draw(st.sampled_from(sorted(RIGHT)))
    names = draw(st.lists(st.sampled_from(sorted(RIGHT[path])), min_size=1, max_size=4, unique=True))
    return path, RIGHT[path] | {name: draw(wrong_values) for name in names}


class Asker:
    """One connection, kept alive."""

    def __init__(self, server: RunningServer) -> None:
        self._server = server
        self._connection = http.client.HTTPConnection(*server.address, timeout=30)

    def ask(self, path: str, body: dict[str, Any]) -> Answer:
        data = json.dumps(body).encode()
        self._connection.request("POST", path, data, {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, headers, response.read(), 0.0)

    def close(self) -> None:
        self._connection.close()


def check(asker: Asker, path: str, body: dict[str, Any]) -> None:
    """One body, and the same with the blamed field put right."""
    answer = asker.ask(path, body)
    if answer.status == 200:
        return
    if answer.status in TOO_LATE:  # right, and too short to keep: two milliseconds are a time one may ask for
        check_error(answer, answer.status)
        assert answer.error["code"] == TOO_LATE[answer.status] and body["timeout_s"] < 1, (body, answer.error)
        return
    check_error(answer, (400, 404))
    param = base(answer.error["param"])
    if param is None:
        assert answer.error["code"] == "invalid_json", answer.error
        return
    assert param in body or param in LENGTHS, f"{param} is no field of this body: {answer.error}"
    names = [param, *LENGTHS] if answer.error["code"] == "context_length_exceeded" else [param]
    righted = {name: value for name, value in body.items() if name not in names or name in NEEDED}
    righted |= {name: RIGHT[path][name] for name in NEEDED & {*names} & {*body}}
    again = asker.ask(path, righted)
    if again.status != 200:
        assert again.error != answer.error, f"{param} was put right and is blamed still: {answer.error}"


def run(server: RunningServer, cases: int) -> None:
    """Raises AssertionError with the smallest body that shows what is wrong."""
    with closing(Asker(server)) as asker:
        for path, body in RIGHT.items():
            assert asker.ask(path, body).status == 200

        @settings(
            max_examples=cases,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),  # those of Hypothesis: that a live server is slow
        )
        @given(mutated())
        def one(case: tuple[str, dict[str, Any]]) -> None:
            check(asker, *case)

        one()
    server.wait_until_idle()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    options = parser.parse_args()
    with RunningServer() as server:
        run(server, options.cases)
    print(f"{options.cases} bodies: none broke the server, every refusal named the field to blame")


if __name__ == "__main__":
    main()
