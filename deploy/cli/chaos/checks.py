"""What must hold after a run: of each answer, of each error, and of what is left in the processes.

The invariants are those of `stages/README.md`; I15 is checked in `link_watch.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import orjson

from .fleet import FleetSize
from .history import ClientRequest
from .link_watch import LinkHistory
from .members import FleetMember
from .strikes import StrikeSpan

GRACE_S = 30.0  # from the end of a strike, for its effects: links that count as lost late, engines that are dialled
LINKED_GRACE_S = 0.5  # likewise, if all fronts were linked to the engine again when the strike ended
DEATHS_OF_ONE = 2  # engines that may end under a request before it is given up
SHOWN_CHARS = 60


def check_answers(requests: Iterable[ClientRequest]) -> list[str]:
    """I1 and I2 (with it I17): one end each, and no text but the right one, without gap or repeat."""
    return [f"request {one.number} ({one.case.kind}): {wrong}" for one in requests for wrong in _wrong(one)]


def _wrong(one: ClientRequest) -> list[str]:
    found = []
    if one.num_late:
        found.append(f"I1: {one.num_late} pieces came after an end")
    if one.num_ends > 1 or any(len(reasons) > 1 for reasons in one.finish_reasons.values()):
        found.append(f"I1: it ended more than once: {one.finish_reasons}, {one.num_ends} ends of the stream")
    if one.end == "open":
        found.append("I1: it has not ended")
    for index, right in enumerate(one.case.choices):
        text = one.text(index)
        is_right = text == right.text if one.end == "done" else right.text.startswith(text)
        if not is_right:
            found.append(f"I2: choice {index}: {_difference(text, right.text)}")
        if one.end == "done" and one.finish_reasons.get(index) != [right.finish_reason]:
            found.append(f"I1: choice {index} ended by {one.finish_reasons.get(index)}, not {right.finish_reason}")
    if one.end == "done" and one.num_tokens != one.case.num_tokens:
        found.append(f"I2: it has {one.num_tokens} tokens by its usage, and must have {one.case.num_tokens}")
    return found


def _difference(text: str, right: str) -> str:
    at = next((place for place, pair in enumerate(zip(text, right, strict=False)) if pair[0] != pair[1]), None)
    at = min(len(text), len(right)) if at is None else at
    rest, due = text[at:], right[at:]
    what = "ends early" if not rest else "goes on" if not due else "differs"
    if rest and due.find(rest[:8]) > 0:
        what = "has a gap"
    elif len(rest) >= 8 and right[:at].endswith(rest[:8]):
        what = "repeats itself"
    return f"the text {what} at {at}: {rest[:SHOWN_CHARS]!r}, and must go on with {due[:SHOWN_CHARS]!r}"


def check_errors(
    requests: Iterable[ClientRequest], spans: Sequence[StrikeSpan], links: LinkHistory, size: FleetSize
) -> list[str]:
    """Errors whose owner was not struck: the front; or the engines, if all were away, or two died under a request."""
    found = []
    for one in requests:
        if one.end in ("refused", "broken") and _excuse(one, spans, links, size) is None:
            how = f"status {one.status}, {one.error or 'the stream ended before its answer'}"
            found.append(f"request {one.number} ({one.case.kind}) at front{one.front} failed, unstruck: {how}")
    return found


def _excuse(
    one: ClientRequest, spans: Sequence[StrikeSpan], links: LinkHistory, size: FleetSize
) -> StrikeSpan | str | None:
    """What may have made it fail; None if nothing may have."""
    began_s, ended_s = one.began_s, one.ended_s
    near = [span for span in spans if span.overlaps(began_s, ended_s, LINKED_GRACE_S if span.is_linked else GRACE_S)]
    for span in near:
        if span.may_fail and span.strike.front == one.front:
            return span
    if links.deaths(f"front{one.front}", began_s, ended_s) >= DEATHS_OF_ONE and one.error == "engine_died":
        return "two engines died"
    engines = range(size.num_engines)
    if one.status == 503 and all(any(span.takes_link(one.front, engine) for span in near) for engine in engines):
        return "no engine was there"
    return None


def failures_of(span: StrikeSpan, requests: Iterable[ClientRequest]) -> int:
    """How many requests failed while a strike lasted."""
    lasted = [one for one in requests if one.end in ("refused", "broken")]
    return sum(span.began_s <= one.ended_s <= (span.healed_s or one.ended_s) for one in lasted)


def check_logs(members: Iterable[FleetMember]) -> list[str]:
    """I8 and I14: each line of a log is JSON, and none has the stack of an error that nothing expected."""
    found = []
    for member in members:
        for path in member.log_files:
            found += [f"{path.name}: {wrong}" for wrong in _wrong_lines(path, may_be_torn=bool(member.killed))]
    return found


def _wrong_lines(path: Path, *, may_be_torn: bool) -> list[str]:
    lines = path.read_bytes().splitlines()
    found = []
    for place, line in enumerate(lines):
        try:
            event = orjson.loads(line)
        except orjson.JSONDecodeError:
            if not (may_be_torn and place == len(lines) - 1):
                found.append(f"not a line of the log: {line[:200].decode(errors='replace')}")
            continue
        if isinstance(event, dict) and any(name in event for name in ("exception", "stack", "exc_info")):
            found.append(f"{event.get('event')}: {str(event.get('exception') or event)[-600:]}")
    return found[:3]
