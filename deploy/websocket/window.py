"""The messages of a request that its client has not acknowledged."""

from __future__ import annotations

from collections import deque

MAX_MESSAGES = 256
MAX_BYTES = 1024 * 1024


class Window:
    """Numbers messages from 1 and, with `keep`, keeps them until the client acknowledges them."""

    def __init__(self, keep: bool) -> None:
        self.last = 0  # number of the newest message
        self.num_bytes = 0  # of kept messages
        self._keep = keep
        self._messages: deque[bytes] = deque()  # the newest ones, up to number `last`

    @property
    def acknowledged(self) -> int:
        """The number of the newest message that is not kept."""
        return self.last - len(self._messages)

    @property
    def is_full(self) -> bool:
        """Whether the client must acknowledge messages before it gets more."""
        return len(self._messages) >= MAX_MESSAGES or self.num_bytes >= MAX_BYTES

    def add(self, message: bytes) -> None:
        """Adds the message with number `last` + 1."""
        self.last += 1
        if self._keep:
            self._messages.append(message)
            self.num_bytes += len(message)

    def acknowledge(self, last: int) -> None:
        """Drops messages up to number `last`, which is at most the newest number."""
        while self.acknowledged < last:
            self.num_bytes -= len(self._messages.popleft())

    def after(self, number: int) -> bytes | None:
        """The message after `number`, which is at least `acknowledged`.

        None if it does not exist yet.
        """
        place = number - self.acknowledged
        return self._messages[place] if place < len(self._messages) else None
