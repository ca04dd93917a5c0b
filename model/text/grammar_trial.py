"""Measures the cost of a grammar: compiles it, and generates an answer with it.

Runs in a helper process with limits on time and memory, which `stages/grammar/trial_process.py` starts.
"""

from __future__ import annotations

import ctypes
import json
import random
import time
from typing import Any

from llguidance import LLMatcher

from .grammar import GrammarCompiler, GrammarError, grammar_text
from .vocabulary import Vocabulary

NUM_TOKENS = 64  # most tokens of an answer
MAX_STEP_S = 0.005  # CPU seconds of a token, on average over an answer: 16 such rows make a step of 80 ms
# A virtual machine's host may take the processor away for a few ms, which count as CPU time here, and an answer may be
# one token. So a costly grammar is tried again from the start: once, and then until MAX_TRIALS_S are used.
MAX_TRIALS = 4
MAX_TRIALS_S = 0.3  # CPU seconds of all trials


class GrammarTrials:
    """Trials of grammars with one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.compiler = GrammarCompiler(vocabulary)

    def answer(self, question: bytes) -> bytes:
        """Answers a JSON question (kind, source, is_compact) in JSON: `error`, or `num_bytes` and `cpu_ms`."""
        try:
            return json.dumps(self.run(**json.loads(question))).encode()
        except GrammarError as error:
            return json.dumps({"error": str(error)}).encode()
        except MemoryError:
            return json.dumps({"error": "takes too much memory to compile"}).encode()

    def run(self, kind: str, source: Any, is_compact: bool) -> dict[str, Any]:
        """Raises `GrammarError` for a grammar that does not compile, matches nothing, or is too costly a token."""
        began_s = time.process_time()
        for trial in range(MAX_TRIALS):
            found, step_s = self._try(kind, source, is_compact)
            if step_s <= MAX_STEP_S:
                return found
            if trial > 0 and time.process_time() - began_s > MAX_TRIALS_S:
                break
        raise GrammarError(f"is too costly to follow: more than {MAX_STEP_S * 1e3:g} ms of CPU a token")

    def _try(self, kind: str, source: Any, is_compact: bool) -> tuple[dict[str, Any], float]:
        """The cost of a grammar, and the CPU seconds of a token of an answer."""
        before, began_s = _allocated_bytes(), time.process_time()
        grammar = grammar_text(kind, source, is_compact)
        matcher = self.compiler.compile(grammar)
        compile_s = time.process_time() - began_s
        self.compiler.check_start(matcher)
        answer_s, num_steps = self._write(matcher.deep_copy(), random.Random(0))
        num_bytes = max(_allocated_bytes() - before, len(grammar))
        return {"num_bytes": num_bytes, "cpu_ms": round(compile_s * 1e3, 3)}, answer_s / max(1, num_steps)

    def _write(self, matcher: LLMatcher, draw: random.Random) -> tuple[float, int]:
        """Generates random allowed tokens. Returns the CPU seconds taken, and the number of tokens."""
        began_s, num_steps = time.process_time(), 0
        while num_steps < NUM_TOKENS and (allowed := self.compiler.allowed(matcher)):
            matcher.consume_token(draw.choice(allowed))
            num_steps += 1
        if matcher.is_error():
            raise GrammarError(f"is too costly to follow: {matcher.get_error()[:60].splitlines()[0]}")
        return time.process_time() - began_s, num_steps


_BEFORE = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks")


class _MallocInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (*_BEFORE, "uordblks", "fordblks", "keepcost")]


def _allocated_bytes() -> int:
    """Bytes allocated by the C library, where it reports them (glibc); 0 elsewhere."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = _MallocInfo
    info = mallinfo()
    return int(info.uordblks + info.hblkhd)
