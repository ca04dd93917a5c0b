"""Caches that fill while the server runs, with their bounds: why its memory grows for a while after the start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...runtime.trace.format import RECORD
from ..api.service import MAX_ENDED, CacheUse

if TYPE_CHECKING:
    from ...stages.engine.engine import Engine
    from ..api.service import Service

TOKENIZER_WORDS = 10_000  # of the tokenizers library: words whose tokens one copy of a BPE tokenizer keeps


def caches(engine: Engine, service: Service) -> list[CacheUse]:
    """All caches of this process; in split mode also the rings of the engine process."""
    found = [_trace(engine), CacheUse("ended_requests", len(service.ended), MAX_ENDED)]
    found += [read() for read in service.caches]
    found.append(CacheUse("tokenizer_words", None, TOKENIZER_WORDS))
    status = engine.status()
    if (some := status.front.grammars) is not None:
        found.append(CacheUse("grammars", some.num_grammars, some.max_grammars, some.num_bytes, some.max_bytes))
    if status.core is not None:
        pool = status.core.cache.memory
        found.append(CacheUse("prefix_blocks", pool.num_cached + pool.num_in_use, pool.num_blocks))
    return found


def _trace(engine: Engine) -> CacheUse:
    """The rings of the trace, whose pages are taken as they are written."""
    headers = [reader.header() for reader in engine.pipeline.tracer.readers()]
    most = sum(header["capacity_events"] for header in headers)
    count = sum(min(header["num_written"], header["capacity_events"]) for header in headers)
    return CacheUse("trace_records", count, most, count * RECORD.size, most * RECORD.size)
