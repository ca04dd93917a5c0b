"""Every folder of API routes. A new one is a line here; the server and the OpenAPI document read this list."""

from __future__ import annotations

from ..chat.routes import ChatRoutes
from ..completions.routes import CompletionRoutes
from ..dialects.routes import DialectRoutes
from ..embeddings.routes import EmbeddingRoutes
from ..messages.routes import MessagesRoutes
from ..ollama.routes import OllamaRoutes
from ..openai.api_routes import ApiRoutes
from ..responses.routes import ResponsesRoutes
from ..token_ids.routes import TokenIdsRoutes
from ..tokenize.routes import TokenizeRoutes

API_ROUTES: tuple[type[ApiRoutes], ...] = (
    ChatRoutes,
    CompletionRoutes,
    TokenIdsRoutes,
    DialectRoutes,
    TokenizeRoutes,
    EmbeddingRoutes,
    ResponsesRoutes,
    MessagesRoutes,
    OllamaRoutes,
)
