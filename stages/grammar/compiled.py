"""The compiled grammars of one model: a cache bounded in number and bytes, with use counts.

Written on the event loop; read on the side threads of the device thread. The compiler is loaded with the first
grammar, so an engine without grammars starts without it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...model.text.vocabulary import Vocabulary
from ..structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from ...model.text.grammar import GrammarCompiler

MAX_GRAMMARS = 128
MAX_BYTES = 64 << 20


@dataclass(slots=True, eq=False)
class CompiledGrammar:
    """A compiled grammar in its initial state. Each answer uses a copy of `template`.

    Copies share the parser states that earlier copies have computed. `is_worn` says that these have reached their
    limit, and that the next request needs a new template.
    """

    template: LLMatcher
    num_bytes: int  # measured in the trial
    num_users: int = 0  # requests in progress
    is_worn: bool = False


class Grammars:
    """At most `max_grammars` grammars of `max_bytes` in total, in memory only.

    Evicts the least recently used grammar that no request uses. Grammars in use are never evicted.
    """

    def __init__(
        self,
        make_vocabulary: Callable[[], Vocabulary],
        max_grammars: int = MAX_GRAMMARS,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self.max_grammars = max_grammars
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._make_vocabulary = make_vocabulary
        self._vocabulary: Vocabulary | None = None
        self._compiler: GrammarCompiler | None = None
        self._compiled: OrderedDict[StructuredOutputs, CompiledGrammar] = OrderedDict()

    def __len__(self) -> int:
        return len(self._compiled)

    # -- from any thread

    @property
    def vocabulary(self) -> Vocabulary:
        """The model's vocabulary. The first call is slow: a large one takes some tenths of a second."""
        if self._vocabulary is None:
            self._vocabulary = self._make_vocabulary()
        return self._vocabulary

    @property
    def compiler(self) -> GrammarCompiler:
        """The grammar compiler. The first call is slow, as it reads the vocabulary."""
        if self._compiler is None:
            from ...model.text.grammar import GrammarCompiler

            self._compiler = GrammarCompiler(self.vocabulary)
        return self._compiler

    def compile(self, structured: StructuredOutputs) -> LLMatcher:
        """Compiles a grammar; takes up to the limit of its trial. Raises `GrammarError`."""
        from ...model.text.grammar import grammar_text

        source, is_compact = source_of(structured), structured.disable_any_whitespace
        grammar = grammar_text(structured.kind, source, is_compact)
        if structured.after is not None:
            grammar = self.compiler.after_thoughts(grammar, structured.after)
        return self.compiler.compile(grammar)

    def begin(self, structured: StructuredOutputs) -> LLMatcher:
        """A matcher for one answer. Compiles the grammar if the gate did not. Raises `GrammarError`."""
        known = self._compiled.get(structured)
        return self.compile(structured) if known is None else known.template.deep_copy()

    def wear_out(self, structured: StructuredOutputs) -> None:
        """Marks a grammar as worn after an answer failed: its shared state may be the cause."""
        known = self._compiled.get(structured)
        if known is not None:
            known.is_worn = True

    # -- on the loop

    def use(self, structured: StructuredOutputs) -> bool:
        """Adds a user if the grammar is compiled and not worn; returns whether it did."""
        known = self._compiled.get(structured)
        if known is None or known.is_worn:
            return False
        known.num_users += 1
        self._compiled.move_to_end(structured)
        return True

    def release(self, structured: StructuredOutputs) -> None:
        """Removes a user."""
        self._compiled[structured].num_users -= 1

    def add(self, structured: StructuredOutputs, template: LLMatcher, num_bytes: int) -> bool:
        """Stores a grammar; False if those in use leave no room.

        A worn one of the same text passes on its users.
        """
        old = self._compiled.get(structured)
        num_users = 0 if old is None else old.num_users
        if old is not None:
            self._drop(structured)
        fits = self._evict_unused(num_bytes)
        if fits or old is not None:
            kept = CompiledGrammar(template, num_bytes, num_users)
            self._compiled[structured] = kept
            self.num_bytes += num_bytes
        return fits or old is not None

    def _evict_unused(self, num_bytes: int) -> bool:
        while len(self) >= self.max_grammars or self.num_bytes + num_bytes > self.max_bytes:
            unused = next((key for key, known in self._compiled.items() if not known.num_users), None)
            if unused is None:
                return False
            self._drop(unused)
        return True

    def _drop(self, structured: StructuredOutputs) -> None:
        self.num_bytes -= self._compiled.pop(structured).num_bytes


def source_of(structured: StructuredOutputs) -> str | tuple[str, ...]:
    """The text, or texts, that the kind is about."""
    if structured.kind == "json_object":
        return ""
    source = getattr(structured, structured.kind)
    assert isinstance(source, (str, tuple))
    return source
