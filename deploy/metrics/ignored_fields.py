"""`IgnoredFields`: what the server tells of fields of requests that it does not know, and how many there were."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from ...runtime.env.log import get_logger
from ..errors import nearest_name

MAX_CHARS = 64  # of a name, as it is shown
MAX_NAMES = 256  # that are remembered, and so logged once
MAX_LINES, LINE_S = 20, 60.0  # of the log at once, and until there may be one more

log = get_logger("millrace.deploy")


def shown_name(name: str) -> str:
    """A name as a client sent it, for logs and headers: cut, and with `?` for characters that are unsafe there."""
    return re.sub(r"[^A-Za-z0-9_.-]", "?", name[:MAX_CHARS])


class IgnoredFields:
    """Counts them, and logs each name once, with the known name that is most like it.

    Names are from clients, who may send any number of them: few are remembered, and lines of the log come slowly. May
    be called in any thread.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_fields = 0
        self._clock, self._lock = clock, threading.Lock()
        self._names: dict[str, None] = {}  # logged ones, the oldest first
        self._num_lines, self._counted_s = float(MAX_LINES), clock()  # that may be logged now

    def note(self, names: Sequence[str], known: Iterable[str]) -> None:
        """A request has these fields, and might have the `known` ones."""
        with self._lock:
            self.num_fields += len(names)
            for name in names[:MAX_NAMES]:
                if (shown := shown_name(name)) not in self._names and self._may_log():
                    self._names[shown] = None
                    if len(self._names) > MAX_NAMES:
                        del self._names[next(iter(self._names))]
                    log.warning("request.unknown_field", field=shown, perhaps_meant=nearest_name(name, known))

    def _may_log(self) -> bool:
        now_s = self._clock()
        self._num_lines = min(float(MAX_LINES), self._num_lines + (now_s - self._counted_s) / LINE_S)
        self._counted_s = now_s
        if self._num_lines < 1.0:
            return False
        self._num_lines -= 1.0
        return True
