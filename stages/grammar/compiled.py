"""The compiled grammars of one model: which there are, what they take, and who uses them.

Written on the event loop; read on the device's side threads. The compiler is loaded when the first grammar comes, so an
engine that nobody asks for one starts without it.
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

    from ...model.text.grammar import Compiler

MAX_GRAMMARS = 128
MAX_BYTES = 64 << 20


@dataclass(slots=True, eq=False)
class Compiled:
    """A grammar at its beginning. Answers are written with copies, which share what the copies before have found out;
    `is_worn` says that this has come to its limit, and that the next request needs a new one."""

    template: LLMatcher
    num_bytes: int  # as compiled and tried
    num_users: int = 0  # requests under way
    is_worn: bool = False


class Grammars:
    """At most `max_grammars` grammars of `max_bytes` in all, in memory only. What no request uses goes first, the
    longest unused before others; what is used stays."""

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
        self._compiler: Compiler | None = None
        self._compiled: OrderedDict[StructuredOutputs, Compiled] = OrderedDict()

    def __len__(self) -> int:
        return len(self._compiled)

    # -- from any thread

    @property
    def vocabulary(self) -> Vocabulary:
        """The model's. Slow at first: a large one takes some tenths of a second."""
        if self._vocabulary is None:
            self._vocabulary = self._make_vocabulary()
        return self._vocabulary

    @property
    def compiler(self) -> Compiler:
        """Slow at first, as it reads the vocabulary."""
        if self._compiler is None:
            from ...model.text.grammar import Compiler

            self._compiler = Compiler(self.vocabulary)
        return self._compiler

    def compile(self, structured: StructuredOutputs) -> LLMatcher:
        """Slow, by as much as the grammar's trial has allowed. Raises `GrammarError`."""
        from ...model.text.grammar import grammar_text

        source, is_compact = source_of(structured), structured.disable_any_whitespace
        return self.compiler.compile(grammar_text(structured.kind, source, is_compact))

    def begin(self, structured: StructuredOutputs) -> LLMatcher:
        """A matcher for one answer; compiled first only if the grammar came past the gate. Raises `GrammarError`."""
        known = self._compiled.get(structured)
        return self.compile(structured) if known is None else known.template.deep_copy()

    def wear_out(self, structured: StructuredOutputs) -> None:
        """An answer failed: what is known of the grammar may be the cause."""
        known = self._compiled.get(structured)
        if known is not None:
            known.is_worn = True

    # -- on the loop

    def use(self, structured: StructuredOutputs) -> bool:
        """Whether the grammar is there; if so, one request more uses it."""
        known = self._compiled.get(structured)
        if known is None or known.is_worn:
            return False
        known.num_users += 1
        self._compiled.move_to_end(structured)
        return True

    def release(self, structured: StructuredOutputs) -> None:
        """One request less uses it."""
        self._compiled[structured].num_users -= 1

    def add(self, structured: StructuredOutputs, template: LLMatcher, num_bytes: int) -> bool:
        """False if those in use leave no room. A worn one of the same text is replaced, and keeps its users."""
        old = self._compiled.get(structured)
        num_users = 0 if old is None else old.num_users
        if old is not None:
            self._drop(structured)
        has_room = self._make_room(num_bytes)
        if has_room or old is not None:
            kept = Compiled(template, num_bytes, num_users)
            self._compiled[structured] = kept
            self.num_bytes += num_bytes
        return has_room or old is not None

    def _make_room(self, num_bytes: int) -> bool:
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
