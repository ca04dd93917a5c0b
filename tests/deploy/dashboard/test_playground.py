"""The playground in a real browser, with the bundled model: turns, calls, tokens, branches, and how answers end."""

from __future__ import annotations

import ast
import json
import re
import shlex
import sys
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from tests.deploy.browser import accessibility, check_that_it_stayed_at_home, opened, show, until
from tests.deploy.running import RunningServer

pytestmark = pytest.mark.slow

TEMPLATE = "{{ tools | tojson if tools }}{% for m in messages %}{{ m.role ~ ': ' ~ m.content }}\n{% endfor %}"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SPEED = {"name": "set_speed", "parameters": {"type": "object", "properties": {"speed": {"enum": [1, 2]}}}}
ANSWER = "[data-turn=assistant]"
STATE = "/static/dashboard/chat/state.js"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    flags = ["--port", "0", "--log-level", "warning", "--chat-template", TEMPLATE]
    with RunningServer(command=[sys.executable, "-m", "millrace.deploy", "serve", *flags]) as running:
        yield running


@pytest.fixture(scope="module")
def shown(server: RunningServer) -> Iterator[Any]:
    with opened(server.url + "/dashboard#/playground") as page:
        page.bodies = []
        page.set_default_timeout(90_000)
        page.locator("#chat-model option").first.wait_for(state="attached")
        page.on("request", lambda sent: page.bodies.append(sent.post_data_json) if sent.method == "POST" else None)
        yield page


@pytest.fixture
def page(shown: Any) -> Any:
    """The playground with a new conversation of short, certain answers."""
    shown.evaluate(
        """async () => {
          const { chat, DEFAULTS, restart } = await import('/static/dashboard/chat/state.js');
          Object.assign(chat, { settings: { ...DEFAULTS, temperature: '0', max_tokens: '12' }, draft: '' });
          restart();
          millraceDashboard.redraw();
        }"""
    )
    shown.bodies.clear()
    shown.locator(".welcome").wait_for()
    return shown


def send(page: Any, text: str) -> None:
    page.fill("#chat-draft", text)
    page.locator("#chat-draft").press("Control+Enter")
    wait(page)


def wait(page: Any) -> None:
    """Until the last answer is complete, and drawn."""
    claim = "millraceDashboard.state.chat.running === null && !document.querySelector('.composer .stop')"
    until(page, claim, timeout_s=90.0)
    page.evaluate("new Promise((done) => requestAnimationFrame(done))")  # an answer may end before anything is drawn


def tokens(page: Any) -> list[dict[str, Any]]:
    """Those of the last answer, as the page keeps them."""
    kept: dict[str, Any] = json.loads(page.evaluate("sessionStorage.getItem('millrace.chat')"))
    at, found = "0", []
    while at in kept["tree"]["picked"]:
        at = str(kept["tree"]["picked"][at])
        found = kept["tree"]["nodes"][at].get("tokens", found)
    return found


def text(page: Any) -> str:
    """The last answer, as the page keeps it."""
    said: str = page.evaluate("millraceDashboard.state.chat.tree.path().at(-1).text")
    return said


def fact(page: Any, name: str) -> str:
    text: str = page.locator(f".inspector [data-fact='{name}']").text_content()
    return text


def test_a_chat_of_three_turns_ends_with_the_result_of_a_tool(page: Any):
    page.get_by_label("System prompt").fill("You are a miller.")
    send(page, "Who are you?")
    send(page, "And where?")
    page.locator("summary", has_text="Tools").click()
    page.get_by_label("Tools JSON").fill(json.dumps(SPEED))
    page.get_by_label("Tool choice").select_option("required")
    page.get_by_label("Max tokens").fill("60")
    send(page, "Slower, please.")
    arguments = json.loads(page.locator("[data-figure=arguments]").text_content())
    assert arguments["speed"] in (1, 2)
    page.get_by_label("Result of set_speed").fill('{"done": true}')
    page.locator("button", has_text="Send the result").click()
    wait(page)
    roles = [message["role"] for message in page.bodies[-1]["messages"]]
    assert roles == ["system", *["user", "assistant"] * 3, "tool"]
    call, result = page.bodies[-1]["messages"][-2:]
    assert call["tool_calls"][0]["id"] == result["tool_call_id"] and result["content"] == '{"done": true}'
    assert page.bodies[-1]["tool_choice"] == "auto"  # a call is forced once
    assert page.locator(ANSWER).count() == 4
    page.reload()  # the tab keeps it
    assert page.locator("[data-turn]").count() == 8


def test_each_token_says_when_it_came_and_what_else_was_likely(page: Any):
    send(page, "Once upon a time")
    known = tokens(page)
    assert [token["ms"] for token in known] == sorted(token["ms"] for token in known) and known[0]["ms"] > 0
    page.locator("[data-at='3']").hover()
    assert known[3]["text"].strip() in page.locator(".inspector code").first.text_content()
    assert fact(page, "since request") != "–" and fact(page, "gap").endswith(("ms", "s"))
    assert f"log {known[3]['logprob']:.2f}" in fact(page, "probability") and fact(page, "rank") == "1"
    assert fact(page, "drafted") == ("yes, accepted" if known[3]["isDrafted"] else "no")
    assert re.fullmatch(r"\d+ of \d+", fact(page, "prompt cached"))
    page.locator(".tokens").focus()
    page.keyboard.press("ArrowRight")
    page.locator(".inspector .note", has_text=f"token 5 of {len(known)}").wait_for()
    page.keyboard.press("Escape")
    page.locator(".inspector").wait_for(state="detached")
    page.get_by_text("Probability", exact=True).click()
    page.locator(".heat-1, .heat-2, .heat-3, .heat-4").first.wait_for()
    page.locator(".timing summary").click()
    page.locator(".timing .waterfall [data-service=execute]").wait_for()


def test_another_token_begins_a_branch_that_goes_on_exactly_from_there(page: Any, server: RunningServer):
    send(page, "Once upon a time")
    before = tokens(page)
    page.locator("[data-at='2']").click()
    page.locator(".alternatives button").first.press("Enter")
    page.locator("[data-figure=version]", has_text="2 / 2").wait_for()
    wait(page)
    assert page.evaluate("document.activeElement.id") == "chat-draft"  # and not lost with the button
    prompt, after = page.bodies[-1]["prompt"], tokens(page)
    other = next(token_id for token_id, _, _ in before[2]["top"] if token_id != before[2]["id"])
    assert prompt[-3:] == [before[0]["id"], before[1]["id"], other] == [token["id"] for token in after[:3]]
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 9, "return_token_ids": True}
    assert [token["id"] for token in after[3:]] == server.post(TEXT, body).json["choices"][0]["token_ids"]
    page.locator("[aria-label='Earlier version']").click()
    assert tokens(page) == before
    page.locator(".branches button", has_text=before[3]["text"].strip()[:3]).last.wait_for()


def endlessly(route: Any) -> None:
    route.continue_(post_data=json.dumps(route.request.post_data_json | {"ignore_eos": True}))


def test_escape_stops_an_answer_which_goes_on_from_there(page: Any):
    page.route("**/completions", endlessly)
    page.get_by_label("Max tokens").fill("900")
    page.fill("#chat-draft", "Once upon a time")
    page.keyboard.press("Control+Enter")
    page.locator("[data-at='4']").wait_for()
    page.keyboard.press("Escape")
    page.locator("[data-figure=end]", has_text="Stopped.").wait_for()
    kept = len(tokens(page))
    page.get_by_label("Max tokens").fill(str(kept + 5))
    page.locator("button", has_text="Go on").click()
    page.locator("[data-figure=end]", has_text=f"Cut off after {kept + 5} tokens").wait_for()
    assert len(tokens(page)) == kept + 5
    page.unroute("**/completions")


def test_a_cut_answer_goes_on_with_as_many_tokens_and_keeps_what_had_none(page: Any):
    page.route("**/completions", endlessly)
    for inspects in (True, False):
        page.evaluate(f"async () => {{ (await import('{STATE}')).chat.settings.inspects = {json.dumps(inspects)} }}")
        send(page, "Once upon a time")
        said = [text(page)]
        for _ in range(2):
            page.locator("button", has_text="Go on").last.click()
            wait(page)
            assert page.bodies[-1]["max_tokens"] == 12
            said.append(text(page))
            page.evaluate(f"async () => {{ (await import('{STATE}')).chat.settings.inspects = true }}")
        assert [last.startswith(first) and last != first for first, last in pairwise(said)] == [True, True], said
    page.unroute("**/completions")


def test_a_reload_says_that_it_ended_the_answer_and_keeps_what_came(page: Any):
    page.route("**/completions", endlessly)
    page.get_by_label("Max tokens").fill("900")
    page.fill("#chat-draft", "Once upon a time")
    page.keyboard.press("Control+Enter")
    page.locator("[data-at='4']").wait_for()
    page.unroute("**/completions")
    page.reload()
    page.locator("[data-figure=end]", has_text="The page was reloaded during this answer").wait_for()
    assert page.locator("[data-turn]").count() == 2 and len(tokens(page)) >= 5


def test_fields_that_are_wrong_are_named_before_they_are_sent(page: Any):
    page.bodies.clear()
    for settings, words in (
        ({"tools": "null"}, "Tools: must be a list of functions"),
        ({"tools": '["get_weather"]'}, "Tools: must be a list of functions"),
        ({"format": "json_schema", "schema": "{bad"}, "JSON schema: "),
    ):
        page.evaluate(
            f"async (given) => {{ Object.assign((await import('{STATE}')).chat.settings, {{ tools: '' }}, given) }}",
            settings,
        )
        send(page, "Hello")
        end = page.locator("[data-figure=end]").last
        assert words in end.text_content() and end.locator("button", has_text="Try again").count() == 1
    assert page.bodies == []


def test_a_server_that_gives_fewer_likeliest_tokens_is_asked_for_no_more(page: Any):
    asked = """async (most) => {
      const { inspected } = await import('/static/dashboard/chat/body.js');
      const ask = (body) => inspected(body, { inspects: true }, { max_logprobs: most });
      const [chat, text] = [ask({ messages: [] }), ask({})];
      return [chat.logprobs, chat.top_logprobs, text.logprobs];
    }"""
    assert page.evaluate("millraceDashboard.feed.hello.chat.max_logprobs") == 20
    assert [page.evaluate(asked, most) for most in (0, 3, 20)] == [[True, 0, 0], [True, 3, 3], [True, 8, 8]]


def test_too_many_answers_are_one_turn_that_says_so(page: Any):
    page.get_by_label("Answers").fill("100000000")
    send(page, "Hello")
    page.locator("[data-figure=end]", has_text="field n").wait_for()
    assert page.locator("[data-figure=version]").count() == 0
    page.complaints.clear()


def test_a_conversation_too_long_for_the_tab_is_kept_without_alternatives(page: Any):
    send(page, "Once upon a time")
    page.evaluate(
        f"""async () => {{
          const {{ chat, save }} = await import('{STATE}');
          const node = chat.tree.path().at(-1);
          node.tokens[0].top = [[1, "x".repeat(6_000_000), -1]];
          save();
        }}"""
    )
    assert [token["top"] for token in tokens(page)] == [[]] * 12
    assert page.evaluate("millraceDashboard.state.chat.tree.path().at(-1).tokens[1].top.length") == 8


EMPTY = 'data: {"id": "x", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "stop_reason": null}]}\n\n'
HALF = 'data: {"id": "x", "choices": [{"index": 0, "delta": {"content": "Half of "}, "finish_reason": null}]}\n\n'
FULL = {"error": {"message": "too many requests wait", "code": "overloaded", "param": None, "type": "x"}}
ENDINGS: dict[str, tuple[dict[str, Any] | None, str, str]] = {
    "empty": ({"body": EMPTY + "data: [DONE]\n\n"}, "An empty answer.", "Try again"),
    "cut": ({"body": HALF}, "The connection was lost in the middle of the answer.", "Go on"),
    "gone": (None, "The server does not answer.", "Try again"),
    "full": ({"status": 429, "headers": {"Retry-After": "3"}, "json": FULL}, "Try again in 3 s.", "Try again"),
    "proxy": ({"status": 502, "body": "<h1>Bad gateway</h1>"}, "Bad gateway (502)", "Try again"),
}


def answer(made: dict[str, Any] | None, route: Any) -> None:
    route.abort() if made is None else route.fulfill(**made)


def test_an_answer_that_is_none_says_what_happened_and_what_to_do(page: Any):
    for made, words, button in ENDINGS.values():
        page.route("**" + CHAT, partial(answer, made))
        page.fill("#chat-draft", "Hello")
        page.locator("#chat-draft").press("Control+Enter")
        end = page.locator("[data-figure=end]").last
        end.get_by_text(words).wait_for()
        assert end.locator("button", has_text=button).count() == 1
        page.unroute("**" + CHAT)
        page.locator("button", has_text="New").click()
    page.complaints.clear()  # the browser's own, of the faults above


def test_the_server_names_the_wrong_field_and_a_base_model_completes(page: Any):
    page.get_by_label("Top p").fill("7")
    send(page, "Hello")
    page.locator("[data-figure=end]", has_text="field top_p").wait_for()
    page.complaints.clear()
    page.get_by_label("Top p").fill("")
    chooses = (
        "async (mode) => (await import('/static/dashboard/chat/body.js')).isChat({ mode }, { has_template: false })"
    )
    assert [page.evaluate(chooses, mode) for mode in ("auto", "completion", "chat")] == [False, False, True]
    page.get_by_text("Completion", exact=True).click()
    page.locator("button", has_text="New").click()
    page.get_by_label("Answers").fill("2")
    send(page, "Once upon a time")
    page.locator("[data-figure=version]", has_text="1 / 2").wait_for()
    send(page, " and then")
    assert page.bodies[-1]["prompt"].startswith("Once upon a time") and page.bodies[-1]["prompt"].endswith(" and then")


def test_a_request_is_taken_away_as_curl_and_python(page: Any):
    copies = """async () => {
      const { curl, python } = await import('/static/dashboard/chat/copies.js');
      const body = { messages: [{ role: "user", content: "It's\\n\\"so\\"" }], top_k: 3, stop: null, seed: 1 };
      return [curl("http://h/", "v1/chat/completions", body, true), python("http://h/", body, "m", false)];
    }"""
    command, program = page.evaluate(copies)
    assert "'It'\\''s" not in command and "It'\\''s" in command and "$OPENAI_API_KEY" in command
    (call,) = [node for node in ast.walk(ast.parse(program)) if getattr(node, "attr", "") == "create"]
    given = next(node for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Call) and len(node.keywords) > 3)
    fields = {keyword.arg: ast.literal_eval(keyword.value) for keyword in given.keywords}
    assert fields["messages"][0]["content"] == 'It\'s\n"so"' and fields["extra_body"] == {"top_k": 3}
    assert call.attr == "create" and fields["model"] == "m" and fields["stop"] is None


def test_the_next_request_is_copied_with_the_draft(page: Any):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_label("System prompt").fill("You are a miller.")
    page.fill("#chat-draft", "What's new?")
    page.locator("summary", has_text="Copy as").click()
    page.locator("button", has_text="curl").click()
    page.locator(".note", has_text="Copied.").wait_for()
    command = shlex.split(page.evaluate("navigator.clipboard.readText()"))
    body = json.loads(command[command.index("-d") + 1])
    assert body["messages"] == [
        *({"role": "system", "content": "You are a miller."}, {"role": "user", "content": "What's new?"})
    ]
    assert command[1].endswith(CHAT) and body["temperature"] == 0 and body["max_tokens"] == 12 and body["stream"]


MARKUP = "<img src=x onerror=alert(1)><b>bold</b>"


def test_what_a_model_writes_is_shown_as_text(page: Any):
    call = {"index": 0, "id": "c", "function": {"name": MARKUP, "arguments": MARKUP}}
    deltas = [{"content": MARKUP}, {"reasoning": MARKUP}, {"tool_calls": [call]}]
    chunks = [{"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append({"id": "x", "choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.route("**" + CHAT, partial(answer, {"body": body}))
    send(page, MARKUP)
    page.unroute("**" + CHAT)
    assert page.locator(".turns").text_content().count(MARKUP) >= 5
    assert page.locator(".turns img, .turns b").count() == 0


def test_the_reasoning_of_an_answer_that_goes_on_is_parted_from_its_text(page: Any):
    parted = (
        "async (raw) => { const { parted } = await import('/static/dashboard/chat/answer.js'); return parted(raw); }"
    )
    for raw, thoughts, text in (
        ("<think>\nSo", "So", ""),
        ("<think>\nSo.\n</think>\n\nYes", "So.\n", "Yes"),
        ("So</think>Yes", "So", "Yes"),
    ):
        assert page.evaluate(parted, raw) == {"raw": raw, "thoughts": thoughts, "text": text}


def test_markdown_has_its_look_and_keeps_all_characters(page: Any):
    marks = "async ([text, places]) => (await import('/static/dashboard/chat/marks.js')).marksAt(text, places)"
    text = "# Mill\nA **wheel** and `code **x**`.\n```py\nx = `1`\n```\nend **open"
    words = ["Mill", "A", "wheel", "and", "code", "x**", "py", "1", "end", "open"]
    found = page.evaluate(marks, [text, [text.index(word) for word in words]])
    assert found == ["strong", "", "strong", "", "code", "code", "code", "code", "", ""]


def test_the_playground_fits_a_phone_and_everybody(page: Any):
    check = accessibility(page)
    check("an empty conversation")
    send(page, "Once upon a time")
    page.get_by_text("Gap", exact=True).click()
    for width, scheme in ((390, "dark"), (1280, "light")):
        page.set_viewport_size({"width": width, "height": 844})
        page.emulate_media(color_scheme=scheme)
        page.locator("[data-at='3']").click()
        check(f"a token, {width} pixels, {scheme}")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.keyboard.press("Escape")
    page.set_viewport_size({"width": 390, "height": 844})
    page.locator("button", has_text="Settings").click()
    check("the settings on a phone")
    show(page, "playground")
    check_that_it_stayed_at_home(page)
