"""A loop that is woken by another thread: when it wakes, and which of the two runs first."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.runtime.workers.loop_waker import LoopWaker

HAS_EVENTS = hasattr(os, "eventfd")


@pytest.fixture
def has_long_turns() -> Iterator[None]:
    """A thread that keeps the interpreter lock is not interrupted for it."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(60)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.skipif(not HAS_EVENTS, reason="no eventfd: the loop is woken in the usual way")
@pytest.mark.usefixtures("has_long_turns")
def test_who_wakes_a_loop_goes_on_before_the_loop_does():
    async def main() -> None:
        told = asyncio.Event()
        waker = LoopWaker(asyncio.get_running_loop(), lambda: (seen.append(num_steps), told.set()))
        for _ in range(50):
            told.clear()
            thread = threading.Thread(target=work, args=(waker,))
            thread.start()
            await told.wait()
            thread.join()
        waker.close()

    def work(waker: LoopWaker) -> None:
        nonlocal num_steps
        num_steps = 0
        waker.wake()
        for _ in range(20_000):  # some tenths of a millisecond, in which an idle loop would have come to its turn
            num_steps += 1

    seen: list[int] = []
    num_steps = 0
    asyncio.run(main())
    assert seen == [20_000] * 50


@pytest.mark.parametrize("has_events", [True, False] if HAS_EVENTS else [False])
def test_a_loop_hears_of_wakes_until_it_listens_no_more(has_events: bool, monkeypatch: pytest.MonkeyPatch):
    if not has_events:
        monkeypatch.delattr(os, "eventfd", raising=False)

    async def main() -> LoopWaker:
        waker = LoopWaker(asyncio.get_running_loop(), told.set)
        for _ in range(3):
            await asyncio.to_thread(waker.wake)
            await told.wait()
            told.clear()
        waker.close()
        return waker

    told = asyncio.Event()
    waker = asyncio.run(main())
    waker.wake()  # by a late thread: the loop is closed
    assert not told.is_set()


@pytest.mark.skipif(not HAS_EVENTS, reason="no eventfd")
def test_files_are_closed_with_their_wakers():
    async def main() -> int:
        files = []
        for _ in range(20):
            waker = LoopWaker(asyncio.get_running_loop(), int)
            assert waker._file is not None
            files.append(waker._file)
            waker.close()
        return len(set(files))

    assert asyncio.run(main()) <= 2


@pytest.mark.skipif(not HAS_EVENTS, reason="no eventfd")
def test_a_thread_that_outlives_the_interpreters_exit_writes_into_no_other_file(tmp_path: Path):
    """Daemon threads run until the very end: a descriptor number reused by then could be a log's."""
    script = """if True:
        import asyncio, os, sys, weakref
        from millrace.runtime.workers.loop_waker import LoopWaker

        async def main():
            return LoopWaker(asyncio.get_running_loop(), int)

        def leave():
            while os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY) < 20:  # every number that is free
                pass
            waker.wake()

        class Thing:
            pass

        thing = Thing()
        weakref.finalize(thing, leave)
        waker = asyncio.run(main())
        """
    path = tmp_path / "log"
    subprocess.run([sys.executable, "-c", script, str(path)], check=True, timeout=60)
    assert path.read_bytes() == b""
