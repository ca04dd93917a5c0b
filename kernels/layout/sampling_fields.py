"""The sampling fields of a request. Each is described once, in `FIELDS`; the other layers derive from it.

- `SamplingParams`: ranges; the dataclass repeats names and defaults, and a test compares them.
- `has_plain_choice`: whether a row may have drafts, and be chosen with its forward pass.
- `SlotParams`: the columns of `DRAWS` and `PENALTIES`, filled when a sequence starts.
- `sampling_rows.py` and `step_state.py`: the places of the same numbers in a slot's rows on a GPU.
- The native library: a row of `DRAWS` for each slot. It repeats the names, which are compared when it is loaded.
- Beam search: the fields that it refuses. Recordings: the fields of scope PLAN. Checkpoints: the defaults they give.
- The API: body fields, OpenAPI, other servers' names, and the table in `deploy/docs/api.md`.

A new field of phase CUT is a row here, a line in `stages/params.py`, and its rule in the four places that cut:
`stages/sample/sampling_math.py`, `kernels/reference/sampling.py`, `kernels/triton/thresholds.py` and
`kernels/native/source/sampling/sampling.cpp`.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from enum import Enum
from operator import attrgetter
from typing import Any

MAX_N = 128
MAX_LOGPROBS = 20
MAX_WHOLE = 2**31 - 1


class Kind(Enum):
    """The JSON type of a field."""

    WHOLE = "integer"
    NUMBER = "number"
    FLAG = "boolean"
    TEXT = "string"
    LIST = "array"
    OBJECT = "object"


class Phase(Enum):
    """What a field acts on. The sampler applies PENALTY, EDIT, STEER, DRAW and CUT in this order."""

    PENALTY = "penalises tokens that occurred"
    EDIT = "edits logits"
    STEER = "masks logits or forces tokens"
    DRAW = "scales a draw"  # no effect on greedy rows, as CUT and SEED
    CUT = "removes tokens from a draw"
    SEED = "seeds a draw"
    END = "ends the answer"
    REPORT = "is reported beside the tokens"
    TEXT = "changes text, not tokens"


class Scope(Enum):
    """The part of the engine that reads a field."""

    PLAN = "plan"  # schedule and allocate decide by it
    ROW = "row"  # sample, for each row of a step
    TEXT = "text"  # the stages before and after those of tokens


class Beams(Enum):
    """What a beam search does with a field."""

    BY_PHASE = "refuses what changes logits or draws"
    ALLOW = "allows any value"
    REFUSE = "refuses any value but one"


@dataclass(frozen=True, slots=True)
class SamplingField:
    """One field. `default` is also the value that asks for nothing, except that of `temperature`."""

    name: str
    kind: Kind
    default: Any
    phase: Phase
    about: str  # for OpenAPI and the documentation
    _: KW_ONLY
    least: float = 0  # the range of numbers; with `most` = 0 it is written in `SamplingParams`
    most: float = 0
    excludes_least: bool = False
    may_be_none: bool = False
    scope: Scope = Scope.ROW
    beams: Beams = Beams.BY_PHASE
    in_beams: Any = None  # the value that a beam search needs instead of the default
    from_checkpoint: bool = False  # generation_config.json may give the default
    is_extension: bool = False  # the Responses and Messages APIs take it under the same name
    aliases: tuple[str, ...] = ()  # names that other servers give it; refused with a hint

    @property
    def is_plain(self) -> bool:
        """Whether a choice still depends on logits, seed and position only."""
        return self.phase not in (Phase.PENALTY, Phase.EDIT, Phase.STEER)

    @property
    def is_refused_by_beams(self) -> bool:
        """Whether a beam search takes one value only."""
        if self.beams is not Beams.BY_PHASE:
            return self.beams is Beams.REFUSE
        return self.phase in (Phase.PENALTY, Phase.EDIT, Phase.STEER, Phase.DRAW, Phase.CUT, Phase.SEED)

    def is_on(self, value: float) -> bool:
        """Whether a PENALTY or CUT asks for something. Negative values of a cut that is off at 0 do not."""
        if self.phase is Phase.CUT:
            return value > 0 if self.default == 0 else bool(value < self.default)
        return bool(value != self.default)

    def row_value(self, value: float) -> float:
        """The number in a slot's row: the default of a cut that asks for nothing, else the value."""
        default: float = self.default
        return default if self.phase is Phase.CUT and not self.is_on(value) else value


_WHOLE, _NUMBER, _FLAG, _LIST, _OBJECT = Kind.WHOLE, Kind.NUMBER, Kind.FLAG, Kind.LIST, Kind.OBJECT
_PLAN, _TEXT = Scope.PLAN, Scope.TEXT
_Field = SamplingField

# fmt: off
FIELDS: tuple[SamplingField, ...] = (
    _Field("n", _WHOLE, 1, Phase.REPORT, "answers for each prompt", least=1, most=MAX_N, scope=_PLAN),
    _Field("max_tokens", _WHOLE, 16, Phase.END, "most tokens of an answer; null: up to the end of the context",
           most=MAX_WHOLE, may_be_none=True, scope=_PLAN,
           aliases=("max_new_tokens", "n_predict", "num_predict", "max_length")),
    _Field("min_tokens", _WHOLE, 0, Phase.EDIT, "tokens before which no EOS or stop token id is chosen",
           most=MAX_WHOLE, beams=Beams.ALLOW, is_extension=True, aliases=("min_new_tokens", "min_length")),
    _Field("temperature", _NUMBER, 1.0, Phase.DRAW, "divides logits; 0: the likeliest token, without any cut",
           most=2.0, in_beams=0.0, from_checkpoint=True),
    _Field("top_k", _WHOLE, 0, Phase.CUT, "keeps the k likeliest tokens; 0 or -1: all",
           least=-1, most=MAX_WHOLE, from_checkpoint=True),
    _Field("top_p", _NUMBER, 1.0, Phase.CUT, "keeps the fewest tokens whose joint probability reaches p; 1: all",
           most=1.0, excludes_least=True, from_checkpoint=True),
    _Field("min_p", _NUMBER, 0.0, Phase.CUT, "keeps tokens at least p times as likely as the likeliest; 0: all",
           most=1.0, from_checkpoint=True, is_extension=True),
    _Field("top_n_sigma", _NUMBER, 0.0, Phase.CUT,
           "keeps tokens whose logit is within n standard deviations of the largest; 0 or less: all",
           least=-1.0, most=1000.0, is_extension=True, aliases=("nsigma",)),
    _Field("typical_p", _NUMBER, 1.0, Phase.CUT,
           "keeps the tokens of the most typical surprise, until their joint probability reaches p; 1: all",
           most=1.0, excludes_least=True, from_checkpoint=True, is_extension=True, aliases=("typical",)),
    _Field("presence_penalty", _NUMBER, 0.0, Phase.PENALTY,
           "subtracted from the logit of each token of the answer so far",
           least=-2.0, most=2.0, is_extension=True),
    _Field("frequency_penalty", _NUMBER, 0.0, Phase.PENALTY,
           "subtracted once for each occurrence of the token in the answer",
           least=-2.0, most=2.0, is_extension=True),
    _Field("repetition_penalty", _NUMBER, 1.0, Phase.PENALTY,
           "of tokens of prompt and answer: divides positive logits, multiplies others",
           least=0.01, most=10.0, from_checkpoint=True, is_extension=True, aliases=("repeat_penalty", "rep_pen")),
    _Field("seed", _WHOLE, None, Phase.SEED, "makes draws repeatable; null: another seed for each request",
           least=-(2**63), most=2**63 - 1, may_be_none=True, is_extension=True, aliases=("random_seed",)),
    _Field("stop", _LIST, (), Phase.END, "strings that end the answer",
           scope=_TEXT, aliases=("stopping_strings", "stop_strings", "stop_sequence")),
    _Field("stop_token_ids", _LIST, (), Phase.END, "tokens that end the answer, besides EOS", is_extension=True),
    _Field("include_stop_str_in_output", _FLAG, False, Phase.TEXT,
           "returns also the string or token that ended the answer",
           scope=_TEXT, is_extension=True, aliases=("no_stop_trim",)),
    _Field("ignore_eos", _FLAG, False, Phase.END, "EOS does not end the answer",
           is_extension=True, aliases=("ban_eos_token",)),
    _Field("logit_bias", _OBJECT, {}, Phase.EDIT, "by token id, a number from -100 to 100 that is added to its logit",
           is_extension=True),
    _Field("logprobs", _WHOLE, None, Phase.REPORT, "log-probabilities of chosen tokens, and of the k likeliest",
           most=MAX_LOGPROBS, may_be_none=True, aliases=("n_probs",)),
    _Field("prompt_logprobs", _WHOLE, None, Phase.REPORT, "as logprobs, of each prompt token but the first",
           most=MAX_LOGPROBS, may_be_none=True, scope=_PLAN, beams=Beams.REFUSE),
    _Field("allowed_token_ids", _LIST, None, Phase.EDIT, "the only tokens that may be chosen; null: all",
           may_be_none=True),
    _Field("bad_words", _LIST, (), Phase.TEXT, "words the answer must not contain, with or without a space before",
           scope=_TEXT, beams=Beams.REFUSE, aliases=("banned_strings",)),
    _Field("bad_words_token_ids", _LIST, (), Phase.EDIT, "as token sequences; tokenize adds those of bad_words"),
    _Field("truncate_prompt_tokens", _WHOLE, None, Phase.TEXT,
           "prompt tokens to keep; -1: as many as leave room for the answer",
           may_be_none=True, scope=_TEXT, aliases=("truncate",)),
    _Field("truncation_side", Kind.TEXT, "left", Phase.TEXT, "the side of the prompt that is cut off", scope=_TEXT),
    _Field("extra_args", _OBJECT, {}, Phase.REPORT, "for a logits processor; the engine ignores it"),
    _Field("return_progress", _FLAG, False, Phase.REPORT, "reports progress while the prompt is computed"),
    _Field("skip_special_tokens", _FLAG, True, Phase.TEXT, "leaves special tokens out of the text",
           scope=_TEXT, is_extension=True),
    _Field("spaces_between_special_tokens", _FLAG, True, Phase.TEXT,
           "no effect, as with every fast tokenizer of transformers",
           scope=_TEXT, is_extension=True),
    _Field("structured_outputs", _OBJECT, None, Phase.STEER, "the form that the answer must have", may_be_none=True),
    _Field("thinking_budget", _OBJECT, None, Phase.STEER, "most tokens of thoughts; then their end is forced",
           may_be_none=True, beams=Beams.ALLOW),
)
# fmt: on
BY_NAME = {field.name: field for field in FIELDS}
RANGED = tuple(field for field in FIELDS if field.most)
FROM_CHECKPOINT = tuple(field for field in FIELDS if field.from_checkpoint)
NO_CHECKPOINT = {field.name: field.default for field in FROM_CHECKPOINT}  # for APIs with defaults of their own

# The numbers of a draw, in the order of a slot's row: `temperature` first.
DRAWS = tuple(field for field in FIELDS if field.phase in (Phase.DRAW, Phase.CUT))
CUTS = DRAWS[1:]
PENALTIES = tuple(field for field in FIELDS if field.phase is Phase.PENALTY)
PLACE = {field.name: place for place, field in enumerate(DRAWS)}  # in a row of draws
NO_CUTS: tuple[float, ...] = tuple(cut.default for cut in CUTS)
NO_PENALTIES: tuple[float, ...] = tuple(penalty.default for penalty in PENALTIES)

_draws = attrgetter(*(field.name for field in DRAWS))
_penalties = attrgetter(*(field.name for field in PENALTIES))


def draws_of(params: object) -> tuple[float, ...]:
    """The numbers of a draw in a slot's row, from the attributes of a request."""
    values: tuple[float, ...] = _draws(params)
    if min(values) >= 0:  # ranges leave only negative values that ask for nothing
        return values
    return tuple(field.row_value(value) for field, value in zip(DRAWS, values, strict=True))


def penalties_of(params: object) -> tuple[float, ...]:
    """The penalties of a request, from its attributes."""
    values: tuple[float, ...] = _penalties(params)
    return values
