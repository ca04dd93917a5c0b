"""The HTTP handlers of what Ollama's clients ask about models: lists, details, versions; and changes, all refused.

The server has one model, in memory from start to end, under its served names, and adapters under names of their own.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from concurrent.futures import Executor
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

from aiohttp import web

from ...errors import ApiError, shorten
from ...http.body_reader import read
from ...http.package_version import package_version
from ...http.responses import answer
from ..openai.api_routes import post
from ..openai.generation_body import ModelName
from ..schema.body import Body
from ..service import Service
from .lines import framed

if TYPE_CHECKING:
    from ....stages.outputs import ModelInfo

API_VERSION = "0.12.11"  # of Ollama: the first whose fields, log-probabilities among them, these routes have
FOREVER = "9999-12-31T23:59:59Z"  # when the model leaves memory
SIZES = ((1e9, "B"), (1e6, "M"), (1e3, "K"))  # of a number of weights
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
CHANGES = {  # path -> what a client wants there, and what to do instead
    "/api/create": "start `millrace serve FOLDER` instead, with --chat-template or --served-model-name",
    "/api/copy": "a model has the names that the server was started with: see --served-model-name",
    "/api/push": "this server uploads nothing; publish the model's folder from where it lies",
    "/api/delete": "the served model stays in memory and on disk; stop the server, then remove its folder",
    "/api/blobs/{digest}": "this server takes no files; start `millrace serve FOLDER` or `millrace serve FILE.gguf`",
}


class NamedModelBody(Body):
    """A body that names a model, by its newer or its older field."""

    model: ModelName = None
    name: ModelName = None

    @property
    def named(self) -> str | None:
        return self.model or self.name


N = TypeVar("N", bound=NamedModelBody)


class OllamaShowBody(NamedModelBody):
    """`POST /api/show`."""

    verbose: bool | None = None  # without effect: there is no list of tensors


class OllamaPullBody(NamedModelBody):
    """`POST /api/pull`."""

    stream: bool | None = None
    insecure: bool | None = None


class OllamaModelRoutes:
    """The handlers about models."""

    def __init__(self, service: Service, threads: Executor) -> None:
        self._service = service
        self._threads = threads

    def table(self) -> list[web.RouteDef]:
        """The handler of each path."""
        return [
            post("/api/show", self.show),
            post("/api/pull", self.pull),
            web.get("/api/tags", self.tags),
            web.get("/api/ps", self.ps),
            web.get("/api/version", self.version),
            *(web.route("DELETE" if path.endswith("delete") else "POST", path, self.refuse) for path in CHANGES),
        ]

    async def tags(self, request: web.Request) -> web.Response:
        """`GET /api/tags`: the served names."""
        info = self._service.require_engine().info
        return answer({"models": [self._entry(name, info) | {"modified_at": self._started} for name in self._names()]})

    async def ps(self, request: web.Request) -> web.Response:
        """`GET /api/ps`: the served names, as all are in memory."""
        info = self._service.require_engine().info
        more = {
            "expires_at": FOREVER,
            "size_vram": 0 if info.device == "cpu" else _num_bytes(info),
            "context_length": info.max_model_len,
        }
        return answer({"models": [self._entry(name, info) | more for name in self._names()]})

    async def version(self, request: web.Request) -> web.Response:
        """`GET /api/version`: of Ollama's API, since clients choose what to send by it, and of this server."""
        return answer({"version": API_VERSION, "millrace": package_version()})

    async def show(self, request: web.Request) -> web.Response:
        """`POST /api/show`: what one name stands for."""
        info = self._service.require_engine().info
        name = (await self._take(request, OllamaShowBody)).named
        adapter = self._service.adapter_of(name)
        shown = name or self._service.model_names[0]
        return answer(
            {
                "modelfile": f"# served by millrace {package_version()}, which reads no Modelfile\nFROM {shown}\n",
                "parameters": _parameters(info),
                "template": self._service.require_chat_format().template_source,
                "details": _details(info, None if adapter is None else self._service.model_names[0], self._model),
                "model_info": _model_info(shown, info),
                "capabilities": await self._capabilities(info),
                "modified_at": self._started,
            }
        )

    async def pull(self, request: web.Request) -> web.Response:
        """`POST /api/pull`: success for a served name, which is here already; 404 for any other."""
        body = await self._take(request, OllamaPullBody)
        try:
            self._service.adapter_of(body.named)
        except ApiError as error:
            name = shorten(body.named or "", 128)
            advice = f"; this server downloads no models: start `millrace serve {name}` for it"
            raise ApiError(error.code, error.message + advice, param=error.param) from None
        if body.stream is False:
            return answer({"status": "success"})
        return web.Response(body=framed([{"status": "success"}]), content_type="application/x-ndjson")

    async def refuse(self, request: web.Request) -> web.Response:
        """Any route that would change the models: 403 with the reason."""
        resource = request.match_info.route.resource
        path = "" if resource is None else resource.canonical
        reason = next(reason for known, reason in CHANGES.items() if path.endswith(known))
        raise ApiError("unsupported_operation", f"{request.method} {shorten(request.path, 64)}: {reason}")

    async def _take(self, request: web.Request, kind: type[N]) -> N:

        def make(raw: Mapping[str, Any]) -> N:
            return self._service.read_body(kind, raw)[0]

        return await read(request, self._service.config, self._threads, make, takes_forms=True)

    @property
    def _started(self) -> str:
        """When the server started: the model has been the same since."""
        return datetime.fromtimestamp(self._service.created, UTC).isoformat().replace("+00:00", "Z")

    @property
    def _model(self) -> str | None:
        """The model as the server was asked to serve it: a folder, a Hub id or a file."""
        return self._service.require_engine().config.model

    def _names(self) -> list[str]:
        return [*self._service.model_names, *self._service.adapter_names]

    def _entry(self, name: str, info: ModelInfo) -> dict[str, Any]:
        """A name in a list. As Ollama does, with a tag; names without it are accepted too."""
        tagged = name if ":" in name else f"{name}:latest"
        parent = None if name in self._service.model_names else self._service.model_names[0]
        facts = f"{name} {info.model_id} {info.weights} {info.dtype} {info.quantization}"
        return {
            "name": tagged,
            "model": tagged,
            "size": _num_bytes(info),
            "digest": hashlib.sha256(facts.encode()).hexdigest(),  # of these facts, not of the files
            "details": _details(info, parent, self._model),
        }

    async def _capabilities(self, info: ModelInfo) -> list[str]:
        chat_format, loop = self._service.require_chat_format(), asyncio.get_running_loop()
        shows_tools = await loop.run_in_executor(self._threads, chat_format.shows_tools, {})  # may render the template
        has = {
            "completion": "generate" in info.tasks,
            "tools": "generate" in info.tasks and chat_format.has_auto_tools and shows_tools,
            "thinking": chat_format.has_thoughts,
            "embedding": "embed" in info.tasks and info.has_trained_pooling,
        }
        return [name for name, is_there in has.items() if is_there]


def _num_bytes(info: ModelInfo) -> int:
    return 0 if info.weights is None else info.weights.num_bytes


def _details(info: ModelInfo, parent: str | None, model: str | None) -> dict[str, Any]:
    family = info.family or ""
    return {
        "parent_model": parent or "",
        "format": "gguf" if ".gguf" in (model or "") else "safetensors",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "" if info.weights is None else _size(info.weights.num_weights),
        "quantization_level": info.quantization or DTYPES.get(info.dtype, info.dtype),
    }


def _size(num_weights: int) -> str:
    for unit, letter in SIZES:
        if num_weights >= unit:
            return f"{num_weights / unit:.1f}{letter}"
    return str(num_weights)


def _parameters(info: ModelInfo) -> str:
    """The defaults of a request, as lines of a Modelfile."""
    params = info.default_params
    defaults = {name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    defaults |= {"repeat_penalty": params.repetition_penalty, "num_ctx": info.max_model_len}
    return "\n".join(f"{name:<30} {value:g}" for name, value in defaults.items())


def _model_info(name: str, info: ModelInfo) -> dict[str, Any]:
    family = info.family or "unknown"
    described = {
        "general.architecture": family,
        "general.basename": name,
        "general.parameter_count": None if info.weights is None else info.weights.num_weights,
        f"{family}.context_length": info.max_model_len,
        f"{family}.vocab_size": info.vocab_size,
        f"{family}.embedding_length": None if info.pooling is None else info.pooling.size,
    }
    return {key: value for key, value in described.items() if value is not None}
