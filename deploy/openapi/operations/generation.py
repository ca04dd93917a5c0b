"""Operations that generate, and that convert between text and token ids."""

from __future__ import annotations

from ...api.dialects.tgi import TgiBody
from ...api.openai.bodies import ChatBody, CompletionBody
from ...api.openai.token_ids import GenerateBody
from ...api.openai.tokenize_bodies import DetokenizeBody, TokenizeBody
from ..shapes import openai, other_apis, tgi
from .operation import (
    CHAT_ERRORS,
    ENGINE_ERRORS,
    GENERATION_ERRORS,
    MODEL_ERRORS,
    Content,
    Operation,
    again,
    json,
    json_or_events,
)

ABORT = {"abort": {"operationId": "abortRequest", "parameters": {"id": "$response.header.X-Request-Id"}}}
GENERATE = Operation(
    method="POST",
    path="/generate",
    name="generate",
    group="tokens",
    summary="Completion of token ids in token ids, whole or as a stream; also TGI's and SGLang's dialects",
    body=GenerateBody,
    answers=json_or_events(other_apis.GeneratedTokens, other_apis.GeneratedTokensChunk),
    errors=GENERATION_ERRORS,
)
GENERATION = (
    Operation(
        method="POST",
        path="/v1/chat/completions",
        name="createChatCompletion",
        group="generation",
        summary="The answer to a chat, whole or as a stream",
        body=ChatBody,
        answers=json_or_events(openai.ChatCompletion, openai.ChatCompletionChunk),
        errors=GENERATION_ERRORS,
        links=ABORT,
    ),
    Operation(
        method="POST",
        path="/v1/completions",
        name="createCompletion",
        group="generation",
        summary="Completions of one or several prompts, whole or as a stream",
        body=CompletionBody,
        answers=json_or_events(openai.Completion, openai.CompletionChunk),
        errors=GENERATION_ERRORS,
        links=ABORT,
    ),
    Operation(
        method="DELETE",
        path="/v1/requests/{id}",
        name="abortRequest",
        group="generation",
        summary="Abort a running request; its client gets the partial answer with finish_reason abort",
        parameters={"id": "The id of the answer, or the request's X-Request-Id"},
        answers=json(openai.Aborted),
        errors=("request_not_found",),
    ),
    GENERATE,
    *again(GENERATE, inferenceGenerate="/inference/v1/generate"),
    Operation(
        method="POST",
        path="/generate_stream",
        name="generateStream",
        group="tokens",
        summary="Completion of a text as TGI's stream, an event for each token",
        body=TgiBody,
        answers={200: (Content(content_type="text/event-stream", event=tgi.TgiEvent),)},
        error=tgi.TgiError,
        errors=GENERATION_ERRORS,
    ),
    Operation(
        method="GET",
        path="/info",
        name="tgiInfo",
        group="models",
        summary="The model and its limits, as TGI tells them",
        answers=json(tgi.TgiInfo),
        errors=ENGINE_ERRORS,
    ),
    Operation(
        method="POST",
        path="/v1/chat/completions/render",
        name="renderChatCompletion",
        group="tokens",
        summary="The body for /generate that is equivalent to a chat, without running the model",
        body=ChatBody,
        answers=json(other_apis.RenderedPrompt),
        errors=GENERATION_ERRORS,
    ),
    Operation(
        method="POST",
        path="/v1/completions/render",
        name="renderCompletion",
        group="tokens",
        summary="The bodies for /generate that are equivalent to the prompts, without running the model",
        body=CompletionBody,
        answers=json(other_apis.RenderedPrompts),
        errors=GENERATION_ERRORS,
    ),
    Operation(
        method="POST",
        path="/tokenize",
        name="tokenize",
        group="tokens",
        summary="Token ids of a prompt or a chat",
        body=TokenizeBody,
        answers=json(openai.Tokens),
        errors=CHAT_ERRORS,
        links={"text": {"operationId": "detokenize", "requestBody": {"tokens": "$response.body#/tokens"}}},
    ),
    Operation(
        method="POST",
        path="/detokenize",
        name="detokenize",
        group="tokens",
        summary="The text of token ids",
        body=DetokenizeBody,
        answers=json(openai.DetokenizedText),
        errors=(*MODEL_ERRORS, "tokenizer_error"),
    ),
)
