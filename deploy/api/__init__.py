"""The client APIs (OpenAI, Responses, Messages) and what they share.

Owns: the `Service` that handlers share, and the model's output format (reasoning, tool calls).
In: request bodies as plain data.
Out: requests to the engine, and answers in the form of each API.
Imports: the root of `deploy`, `metrics`, `api/schema` and `api/parsers`. Order of the rooms:
`schema`, `parsers` <- the files here <- `openai` <- `chat`, `completions`, `embeddings` and such <- `adapter` <-
`responses`, `messages`, `ollama`, `dialects` <- `routes`.
Start with: `service.py`, then `chat/routes.py`.
"""
