"""A Jinja sandbox for templates from checkpoints: no attribute reaches Python, and no value gets large.

A render has one budget. Loops, sums, products, concatenations, calls, filters and output are charged to it before they
run, which bounds time and memory without a clock. Templates have the names that transformers provides: `tojson`,
`raise_exception`, `strftime_now`, loop controls and `generation`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from datetime import datetime
from functools import partial
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from .traced_text import TracedMarkup, TracedText, is_traced, joined

BUDGET = "the budget"  # its name among a render's variables; not an identifier, so no template can use it
VALUE_SIZE = 1 << 20  # longest string or list that an expression may give
WORK = 1 << 25  # characters and items that a render may make in total
TURN = 256  # fixed cost of a loop iteration, a call and an output, which take about a microsecond
JINJA_ARGUMENTS = ("_loop_vars", "_block_vars")  # that Jinja adds to each call in a loop or a block
PIECE = 32  # cost of each piece of a traced text that is split
NUMBER_BITS = 4096
LARGEST_ARGUMENT = 999  # most of a width, an indentation or a precision
FILTERS = (
    *("abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "format", "groupby"),
    *("indent", "int", "items", "join", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr"),
    *("replace", "reverse", "round", "safe", "select", "selectattr", "sort", "string", "sum", "title", "trim"),
    *("unique", "upper", "urlencode"),
)
TEXT_FILTERS = frozenset(("capitalize", "join", "lower", "replace", "string", "trim", "upper"))  # keep origins exactly
ITEM_FILTERS = frozenset(("d", "default", "first", "last", "max", "min"))  # give one of the values that they get
WIDE_FIELD = re.compile(r"\d{4}|\*|\{[^{}]*\{")  # a width of four digits, or one given by a value


class RenderBudget:
    """The work that a render may still do, in characters and items, and whether its texts are traced."""

    def __init__(self, work: int = WORK, is_traced: bool = False, value_size: int = VALUE_SIZE) -> None:
        self.left = work
        self.is_traced = is_traced
        self.value_size = value_size  # longest string or list that an expression may give

    def spend(self, amount: int) -> None:
        self.left -= amount
        if self.left < 0:
            _refuse("the template does too much")

    def make(self, size: int) -> None:
        """Charges for a string or list of `size`; raises if it is too large."""
        if size > self.value_size:
            _refuse(f"a value of {size} characters or items; at most {self.value_size}")
        self.spend(size)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The environment that chat templates are compiled in. Each render needs its own Budget as variable BUDGET."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])
    concat = staticmethod(joined)  # of the pieces of a macro or a block

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        self.filters = {name: _paid_filter(name, self.filters[name]) for name in FILTERS}
        self.filters["tojson"] = _paid_filter("tojson", _to_json)
        self.globals = {name: self.globals[name] for name in ("dict", "namespace")}
        self.globals["range"] = range  # bounded in `call`
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda format: now().strftime(format)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Paying().visit(super()._parse(source, name, filename))
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget(context)
        _pay_for_operator(budget, operator, left, right)
        result = super().call_binop(context, operator, left, right)
        return _kept(result, (left, right)) if budget.is_traced else result

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        budget = _budget(__context)
        budget.spend(TURN)
        if __obj is range:
            budget.make(len(range(*args)))
        method = getattr(__obj, "__wrapped__", __obj)  # Jinja wraps str.format
        owner = getattr(method, "__self__", None)
        values = [*args, *(value for name, value in kwargs.items() if name not in JINJA_ARGUMENTS)]
        if isinstance(owner, str | bytes | int | float):
            _pay_for_method(budget, method.__name__, owner, values)
        if not budget.is_traced or not (isinstance(owner, str) or __obj is __self.globals["strftime_now"]):
            return super().call(__context, __obj, *args, **kwargs)
        if isinstance(owner, str):
            _pay_for_pieces(budget, method.__name__, owner, values)
        if type(owner) is str and method is __obj and is_traced(values):
            __obj = getattr(TracedText.of(owner), method.__name__)
        return _kept(super().call(__context, __obj, *args, **kwargs), (owner, *values))

    def handle_exception(self, source: str | None = None) -> NoReturn:
        """Raises a render's error unchanged.

        Jinja would compile and run code to rewrite its traceback. That is allowed only for a template that does not
        compile (`source`), not for a request.
        """
        error = sys.exception()
        if source is None and error is not None:
            raise error
        super().handle_exception(source)

    @staticmethod
    @jinja2.pass_context
    def paid_loop(context: Context, items: Iterable[Any]) -> Iterator[Any]:
        """The items, each charged when its iteration begins."""
        budget = _budget(context)
        for item in items:
            budget.spend(TURN)
            yield item

    @staticmethod
    @jinja2.pass_context
    def paid_text(context: Context, *values: Any) -> str:
        """The values as one text: the result of `~`, and the output of `{{ }}` and of text."""
        texts = [str(value) for value in values]
        budget = _budget(context)
        budget.spend(TURN)
        budget.make(sum(map(len, texts)))
        if not budget.is_traced:
            return "".join(texts)
        return joined(_kept(text, (value,)) for text, value in zip(texts, values, strict=True))


class _Paying(NodeTransformer):
    """Routes loops, `~` and output, which Jinja compiles to plain Python, through the sandbox."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.recursive:
            raise jinja2.TemplateSyntaxError("recursive loops are not available", node.lineno)
        self.generic_visit(node)
        node.iter = _call("paid_loop", [node.iter], node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return _call("paid_text", node.nodes, node.lineno)

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        parts = [nodes.Const(part.data) if isinstance(part, nodes.TemplateData) else part for part in node.nodes]
        node.nodes = [_call("paid_text", parts, node.lineno)]
        return node


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`, which marks assistant text for training; renders its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _call(method: str, arguments: Sequence[nodes.Node], line: int) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), list(arguments), [], None, None, lineno=line)


def _budget(context: Context) -> RenderBudget:
    budget = context.resolve(BUDGET)
    assert isinstance(budget, RenderBudget)
    return budget


def _pay_for_operator(budget: RenderBudget, operator: str, left: Any, right: Any) -> None:
    if operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
        budget.make(len(left) + len(right))
    elif operator == "%" and isinstance(left, str):
        _pay_for_format(budget, left, left.count("%"), right if isinstance(right, tuple) else [right])
    elif operator == "*":
        for sequence, times in ((left, right), (right, left)):
            if isinstance(sequence, Sized) and isinstance(times, int):
                budget.make(len(sequence) * max(times, 0))
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * max(right, 0) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > NUMBER_BITS:
            _refuse(f"a number of {bits} bits; at most {NUMBER_BITS}")


def _pay_for_method(budget: RenderBudget, method: str, owner: str | bytes | float, values: list[Any]) -> None:
    """Charges for the largest result of a string's method. Refuses methods of numbers, as no template needs them."""
    if not isinstance(owner, str) or method in ("encode", "translate"):
        _refuse(f"{type(owner).__name__}.{method} is not available")
    if method == "replace" and len(values) > 1:
        _pay_for_replace(budget, owner, values[0], values[1])
    elif method == "join" and values:
        _pay_for_join(budget, values[0], owner)
    elif method in ("format", "format_map"):
        _pay_for_format(budget, owner, owner.count("{"), values)
    else:
        _bound_numbers(values)
        budget.make(len(owner) + owner.count("\t") * LARGEST_ARGUMENT + LARGEST_ARGUMENT)


def _pay_for_pieces(budget: RenderBudget, method: str, owner: str, values: list[Any]) -> None:
    """Charges for the pieces that a traced text is split into, which take more memory than plain ones."""
    if method in ("split", "rsplit", "splitlines", "replace"):
        separator = values[0] if values else None
        num_pieces = owner.count(separator) if separator and isinstance(separator, str) else len(owner) // 2
        budget.spend(PIECE * num_pieces)


def _pay_for_replace(budget: RenderBudget, text: Any, old: Any, new: Any) -> None:
    text = str(text)
    budget.make(len(text) + text.count(str(old)) * len(str(new)))


def _pay_for_join(budget: RenderBudget, items: Any, separator: Any) -> None:
    if not isinstance(items, Sized):
        _refuse("join needs a list; add `| list`")
    sizes = [len(str(item)) for item in items]  # type: ignore[attr-defined]
    budget.make(sum(sizes) + len(sizes) * len(str(separator)))


def _pay_for_format(budget: RenderBudget, template: str, num_fields: int, values: Iterable[Any]) -> None:
    if WIDE_FIELD.search(template):
        _refuse(f"a field wider than {LARGEST_ARGUMENT}")
    widest = LARGEST_ARGUMENT + sum(len(str(value)) for value in values)
    budget.make(len(template) + num_fields * widest)


def _bound_numbers(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > LARGEST_ARGUMENT:
            _refuse(f"{value} as a width, a count or a precision; at most {LARGEST_ARGUMENT}")


def _paid_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, charged by the size of its value or, if its result can be larger, by the largest result."""
    kind = getattr(function, "jinja_pass_arg", None)  # the argument that Jinja passes before the value

    @jinja2.pass_context
    def paid(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget(context)
        size = len(value) if isinstance(value, Sized) else 1
        values = [*args, *kwargs.values()]
        budget.spend(TURN + size)
        if name == "replace" and len(values) > 1:
            _pay_for_replace(budget, value, values[0], values[1])
        elif name == "join":
            value = list(value)
            _pay_for_join(budget, value, values[0] if values else "")
        elif name == "format":
            _pay_for_format(budget, str(value), str(value).count("%"), values)
        elif name == "sum":
            value = list(value)
            budget.make(sum(len(item) for item in value if isinstance(item, Sized)))
        elif name in ("indent", "round", "tojson"):
            _bound_numbers(values)
            budget.make(str(value).count("\n") * LARGEST_ARGUMENT if name == "indent" else size)
        first = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
        passed = [first[kind.name]] if kind else []
        if not budget.is_traced:
            return function(*passed, value, *args, **kwargs)
        return _traced_filter(name, budget, partial(function, *passed), value, args, kwargs)

    return paid


def _traced_filter(
    name: str, budget: RenderBudget, function: Callable[..., Any], value: Any, args: Any, kwargs: Any
) -> Any:
    """The result of a filter with its origins."""
    values = (value, *args, *kwargs.values())
    if isinstance(value, TracedText) and name not in TEXT_FILTERS:
        budget.spend(PIECE * len(value))
    if name == "join" and "attribute" not in kwargs and len(args) < 2:
        separator = str(args[0] if args else kwargs.get("d", ""))
        return TracedText.of(separator).join(_kept(str(item), (item,)) for item in value)
    if name == "safe":
        return TracedMarkup.of(str(value)) if isinstance(value, str) else _kept(str(value), values)
    if name in ITEM_FILTERS:
        return function(value, *args, **kwargs)
    if type(value) is str and is_traced(values):
        value = TracedText.of(value)
    result = function(value, *args, **kwargs)
    if isinstance(result, TracedText) and name not in TEXT_FILTERS:
        return TracedText(result)  # the filter may have put it together from plain strings
    return _kept(result, values)


def _kept(result: Any, values: Any) -> Any:
    """The result of an operation that does not know of origins: a text of the request, if any of `values` is."""
    is_lost = isinstance(result, str) and not isinstance(result, TracedText)
    return TracedText(result) if is_lost and is_traced(values) else result


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Plain JSON; Jinja's own would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _refuse(problem: str) -> NoReturn:
    raise jinja2.TemplateRuntimeError(f"template_limit: {problem}")
