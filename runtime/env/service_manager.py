"""What this process tells the service manager that started it: systemd's notification protocol, sd_notify(3)."""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping
from contextlib import suppress


class ServiceManager:
    """The service manager, or none: then nothing is sent.

    `watchdog_s` is the longest time between two calls of `alive` before it ends this process; None: it does not watch.
    """

    def __init__(self, address: str | None = None, watchdog_s: float | None = None) -> None:
        """`address`: path of a Unix datagram socket; an "@" in front stands for an abstract one."""
        self._address = address
        self.watchdog_s = watchdog_s

    @classmethod
    def take(cls, environ: MutableMapping[str, str]) -> ServiceManager:
        """The one that `environ` names. Its variables are removed, so that no child speaks for this process.

        Addresses other than Unix sockets are not supported, and count as none.
        """
        address = environ.pop("NOTIFY_SOCKET", "")
        interval_us, pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
        if not address.startswith(("/", "@")):
            return cls()
        is_watched = interval_us.isdecimal() and int(interval_us) > 0 and pid in ("", str(os.getpid()))
        return cls(address, int(interval_us) / 1e6 if is_watched else None)

    def ready(self, status: str) -> None:
        """The service has started; `status` is what `systemctl status` shows, one line."""
        self._send(f"READY=1\nSTATUS={status}")

    def stopping(self) -> None:
        """The service ends."""
        self._send("STOPPING=1")

    def alive(self) -> None:
        """The service makes progress."""
        self._send("WATCHDOG=1")

    def _send(self, text: str) -> None:
        """Never waits: a message that the manager cannot take now is lost."""
        if self._address is None:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sending:
            sending.setblocking(False)
            sending.sendto(text.encode(), address)
