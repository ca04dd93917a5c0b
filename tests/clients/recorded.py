"""What Open WebUI and Continue send, on both of their sides: to Ollama, and to a server of OpenAI's kind.

The fields and their order are those that their sources write; texts are made up. `None` is a request without a body.
"""

from __future__ import annotations

from typing import Any

SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
USER = {"role": "user", "content": "What colour is the sky?"}
WEATHER = {
    "name": "get_weather",
    "description": "Get the weather of a place.",
    "parameters": {
        "type": "object",
        "properties": {"place": {"type": "string", "description": "The place"}},
        "required": ["place"],
    },
}
CALL = {"name": "get_weather", "arguments": {"place": "Oslo"}}
OLLAMA_CALLED = {"role": "assistant", "content": "", "tool_calls": [{"function": CALL}]}
OPENAI_CALL = {"id": "tc_1", "index": 0, "type": "function", "function": CALL | {"arguments": '{"place": "Oslo"}'}}
OPENAI_CALLED = {"role": "assistant", "content": "", "tool_calls": [OPENAI_CALL]}
RAIN = {"role": "tool", "tool_call_id": "tc_1", "content": "rain"}

Call = tuple[str, str, Any]  # method, path, body

OPEN_WEBUI_OLLAMA: dict[str, Call] = {
    "verify": ("GET", "/api/version", None),
    "models": ("GET", "/api/tags", None),
    "loaded": ("GET", "/api/ps", None),
    "show": ("POST", "/api/show", {"name": "demo:latest", "model": "demo:latest"}),
    "chat": (
        "POST",
        "/api/chat",
        {
            "model": "demo:latest",
            "messages": [SYSTEM, USER],
            "stream": True,
            "options": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 42, "num_ctx": 2048, "num_predict": 16}
            | {"repeat_last_n": 64, "repeat_penalty": 1.1, "mirostat": 0, "mirostat_eta": 0.1, "mirostat_tau": 5}
            | {"num_keep": 24, "num_batch": 512, "num_thread": 2, "use_mmap": True, "use_mlock": False, "min_p": 0.0},
            "keep_alive": "5m",
        },
    ),
    "tools": (
        "POST",
        "/api/chat",
        {
            "model": "demo:latest",
            "messages": [SYSTEM, USER, OLLAMA_CALLED, {"role": "tool", "content": "rain"}, USER],
            "tools": [{"type": "function", "function": WEATHER}],
            "stream": True,
            "options": {"num_predict": 8},
        },
    ),
    "title": (
        "POST",
        "/api/chat",
        {"model": "demo:latest", "messages": [USER], "stream": False, "options": {"num_predict": 1000}},
    ),
    "generate": (
        "POST",
        "/api/generate",
        {"model": "demo", "prompt": "Hello", "stream": True, "options": {"stop": ["."]}},
    ),
    "embed": ("POST", "/api/embed", {"model": "demo:latest", "input": ["the sky", "a dog"], "truncate": True}),
    "embeddings": ("POST", "/api/embeddings", {"model": "demo:latest", "prompt": "the sky"}),
}
OPEN_WEBUI_OPENAI: dict[str, Call] = {
    "models": ("GET", "/v1/models", None),
    "chat": (
        "POST",
        "/v1/chat/completions",
        {
            "stream": True,
            "model": "demo",
            "messages": [SYSTEM, {"role": "user", "content": [{"type": "text", "text": "What colour is the sky?"}]}],
            "temperature": 0.7,
            "max_tokens": 16,
            "frequency_penalty": 0.1,
            "seed": 42,
            "stop": ["###"],
            "stream_options": {"include_usage": True},
        },
    ),
    "title": (
        "POST",
        "/v1/chat/completions",
        {"model": "demo", "messages": [USER], "stream": False, "max_completion_tokens": 32},
    ),
    "tools": (
        "POST",
        "/v1/chat/completions",
        {
            "stream": True,
            "model": "demo",
            "messages": [USER, OPENAI_CALLED, RAIN],
            "tools": [{"type": "function", "function": WEATHER}],
            "max_tokens": 8,
        },
    ),
    "embeddings": ("POST", "/v1/embeddings", {"input": ["the sky"], "model": "demo"}),
}
CONTINUE_PARAMS = {"temperature": 0.2, "num_predict": 24, "stop": ["<|endoftext|>"], "num_ctx": 8192}
CONTINUE_OLLAMA: dict[str, Call] = {
    "models": ("GET", "/api/tags", None),
    "show": ("POST", "/api/show", {"name": "demo"}),
    "chat": (
        "POST",
        "/api/chat",
        {
            "model": "demo",
            "messages": [SYSTEM, USER],
            "options": CONTINUE_PARAMS,
            "keep_alive": 1800,
            "stream": True,
            "tools": [{"type": "function", "function": WEATHER}],
        },
    ),
    "not thinking": (
        "POST",
        "/api/chat",
        {"model": "demo", "messages": [USER], "options": CONTINUE_PARAMS, "think": False, "keep_alive": 1800},
    ),
    "complete": (
        "POST",
        "/api/generate",
        {
            "model": "demo",
            "prompt": "def add(a, b):\n    ",
            "raw": True,
            "options": CONTINUE_PARAMS,
            "keep_alive": 1800,
            "stream": True,
        },
    ),
    "embed": ("POST", "/api/embed", {"model": "demo", "input": ["def add(a, b):", "return a + b"]}),
}
CONTINUE_OPENAI: dict[str, Call] = {
    "chat": (
        "POST",
        "/v1/chat/completions",
        {
            "messages": [SYSTEM, USER, OPENAI_CALLED | {"content": " "}, RAIN, USER],
            "model": "demo",
            "max_tokens": 24,
            "temperature": 0.2,
            "stream": True,
            "tools": [{"type": "function", "function": WEATHER}],
            "stream_options": {"include_usage": True},
        },
    ),
    "complete": (
        "POST",
        "/v1/completions",
        {
            "prompt": "def add(a, b):\n",
            "model": "demo",
            "max_tokens": 24,
            "temperature": 0.2,
            "stream": True,
            "stop": ["\n\n"],
        },
    ),
    "embed": ("POST", "/v1/embeddings", {"input": ["def add(a, b):"], "model": "demo"}),
}
EVERYTHING: dict[str, Call] = {
    f"{client}, {name}": call
    for client, calls in {
        "open webui to ollama": OPEN_WEBUI_OLLAMA,
        "open webui to openai": OPEN_WEBUI_OPENAI,
        "continue to ollama": CONTINUE_OLLAMA,
        "continue to openai": CONTINUE_OPENAI,
    }.items()
    for name, call in calls.items()
}
