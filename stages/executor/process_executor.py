"""Ranks as child processes of this one."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...runtime.processes.lasting_starter import LastingStarter
from .executor import StartedRanks

if TYPE_CHECKING:
    from ...model.sharding.comm import Comm  # which imports torch
    from ...model.sharding.process_comm import ProcessComm


class RankProcess:
    """One rank: a `Member` of an order line. Ends with this process, see `end_with_starter`."""

    def __init__(self, rank: int, module: str, num_threads: int) -> None:
        self.name = f"rank {rank}"
        self.sock, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=os.environ | {"OMP_NUM_THREADS": str(num_threads)},
                pass_fds=(theirs.fileno(),),
            )

    def kill(self) -> None:
        self.process.kill()  # does nothing if it has been waited for

    def end_cause(self) -> str | None:
        code = self.process.poll()
        if code is None or code >= 0:
            return None if code is None else f"exit status {code}"
        with suppress(ValueError):
            return f"signal {-code} ({signal.Signals(-code).name})"
        return f"signal {-code}"


class ProcessExecutor:
    """See `Executor`. A rank is `python -m module`, with `num_threads` threads.

    `is_ordered`: as of `ProcessComm`, and the same on all ranks.
    """

    def __init__(self, module: str, num_threads: int, *, is_ordered: bool = False) -> None:
        self._module, self._num_threads, self._is_ordered = module, num_threads, is_ordered

    def start_ranks(self, size: int) -> StartedRanks:
        starter = LastingStarter()
        folder = Path(tempfile.mkdtemp(prefix="millrace-ranks-"))  # 0700
        ranks: list[RankProcess] = []
        comms: list[ProcessComm] = []
        close = partial(_close, ranks, folder, starter)
        try:
            make = partial(RankProcess, module=self._module, num_threads=self._num_threads)
            ranks.extend(starter.start(partial(make, rank)) for rank in range(1, size))
        except OSError:
            close()
            raise

        def join(device: Any) -> Comm:
            from ...model.sharding.process_comm import ProcessComm

            comms.append(ProcessComm(folder, 0, size, device, is_ordered=self._is_ordered))
            return comms[0]

        def abort() -> None:
            for comm in comms:
                comm.abort()

        unlink = partial(shutil.rmtree, folder, ignore_errors=True)
        return StartedRanks(ranks, join, str(folder), abort, unlink, close)


def _close(ranks: list[RankProcess], folder: Path, starter: LastingStarter) -> None:
    for rank in ranks:
        rank.kill()
        rank.process.wait()
    starter.close()
    shutil.rmtree(folder, ignore_errors=True)
