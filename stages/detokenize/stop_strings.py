"""Stop strings in streamed text: what to send, what to hold back, where to end."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds stop strings in one text that arrives in pieces.

    The text ends at the stop string that is complete first; of several complete at the same character, the longest.
    Text that may be the beginning of a stop string is held back, so no part of one is ever sent. The held text is
    shorter than the longest stop string. Time is linear in the text for each stop string. A piece in which no stop
    string can begin costs one character search per stop string.
    """

    __slots__ = ("_held", "_includes_stop", "_progress", "_watches")

    def __init__(self, stops: Sequence[str], includes_stop: bool = False) -> None:
        self._watches = [_Watch(stop) for stop in stops]
        self._includes_stop = includes_stop
        self._progress = 0  # of the watch that has matched most characters
        self._held = ""  # the last `_progress` characters of the text

    def push(self, text: str) -> tuple[str, str | None]:
        """Returns the text to send now, and the stop string that ended it, if any.

        Push nothing after one.
        """
        end, found = len(text), ""
        progress = 0
        for watch in self._watches:
            if not watch.progress and watch.first not in text:
                continue
            at = watch.read(text, end)
            if at is not None and (at < end or len(watch.stop) > len(found)):
                end, found = at, watch.stop
            progress = max(progress, watch.progress)
        if found:
            return self._end(text, end, found), found
        if not progress and not self._progress:
            return text, None
        whole = self._held + text
        cut = len(whole) - progress
        self._progress, self._held = progress, whole[cut:]
        return whole[:cut], None

    def _end(self, text: str, end: int, found: str) -> str:
        whole = self._held + text[:end]
        self._progress, self._held = 0, ""
        return whole if self._includes_stop else whole[: len(whole) - len(found)]

    @property
    def is_idle(self) -> bool:
        """Whether nothing is held back.

        Text in which no stop string begins may then be sent without a push.
        """
        return not self._progress

    def flush(self) -> str:
        """Returns the held text, at the end of the text."""
        held, self._progress, self._held = self._held, 0, ""
        return held


class _Watch:
    """Matches one stop string (Knuth-Morris-Pratt).

    `progress` is the length of the current partial match.
    """

    __slots__ = ("_borders", "first", "progress", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.first = stop[0]
        self.progress = 0
        # Entry k: the length of the longest proper prefix of stop[:k] that is also its suffix. Computed on demand, so
        # that a long stop string costs nothing at the start of a request.
        self._borders = [0, 0]

    def read(self, text: str, end: int) -> int | None:
        """Reads `text[:end]`. Returns the index after the complete stop string, or None."""
        stop, progress = self.stop, self.progress
        at = 0
        while at < end:
            if not progress:
                at = text.find(self.first, at, end)
                if at < 0:
                    break
            if stop[progress] == text[at]:
                progress += 1
                at += 1
                if progress == len(stop):
                    self.progress = 0
                    return at
            else:
                progress = self._border(progress)
        self.progress = progress
        return None

    def _border(self, length: int) -> int:
        stop, borders = self.stop, self._borders
        while len(borders) <= length:
            border, character = borders[-1], stop[len(borders) - 1]
            while border and stop[border] != character:
                border = borders[border]
            borders.append(border + 1 if stop[border] == character else 0)
        return borders[length]
