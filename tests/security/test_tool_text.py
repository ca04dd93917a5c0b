"""Code in the text of a call is text. Nothing that a model writes is compiled, run or loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest

CHECK = """
import json, sys
from millrace.deploy.api.parsers.interface import CallArguments
from millrace.deploy.api.parsers.registry import TOOL_PARSERS

CODE = "__import__('os').system('touch marker')"
seen = []
sys.addaudithook(lambda event, _: seen.append(event) if event in FORBIDDEN else None)
FORBIDDEN = {"pickle.find_class", "exec", "compile", "os.system", "subprocess.Popen", "open", "import"}

def arguments(family, text):
    parser = TOOL_PARSERS[family](("run",))
    events = parser.feed(text) + parser.finish()
    return "".join(event.text for event in events if isinstance(event, CallArguments))

arguments("pythonic", '[run(a="warm-up: loads a codec")]')
seen.clear()
call = '{"name": "run", "arguments": {"code": "' + CODE + '"}}'
texts = {
    "hermes": ["<tool_call>" + call + "</tool_call>", "<tool_call>" + CODE + "</tool_call>"],
    "llama3_json": [call, "<|python_tag|>" + CODE],
    "mistral": ["[TOOL_CALLS][" + call + "]", "[TOOL_CALLS]" + CODE],
    "pythonic": ['[run(code="' + CODE + '")]', "[run(code=" + CODE + ")]", "[" + CODE + "]", "[run(**" + CODE + ")]"],
}
for family, (good, *bad) in texts.items():
    assert json.loads(arguments(family, good)) == {"code": CODE}, family
    assert not any(arguments(family, text) for text in bad), family
assert not seen, seen
print("quiet")
"""


@pytest.mark.slow
def test_code_in_a_call_comes_back_as_text_and_nothing_of_it_is_compiled_or_run(tmp_path):
    done = subprocess.run([sys.executable, "-c", CHECK], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout == "quiet\n", done.stderr
    assert not list(tmp_path.iterdir())
