"""A helper process for tests: it answers requests in capitals, or misbehaves on request."""

from __future__ import annotations

import os
import time

from millrace.runtime.processes.helper_child import serve


def load(opening: bytes):
    def answer(question: bytes) -> bytes:
        if question == b"spin":
            while True:
                pass
        if question == b"grow":
            try:
                return b"%d bytes" % len(bytearray(1 << 30))
            except MemoryError:
                return b"no memory"
        if question == b"abort":
            os.abort()
        if question == b"leave":
            os._exit(3)
        if question == b"sleep":
            time.sleep(1_000.0)
        if question.startswith(b"leave once "):  # and a file that says whether it has
            try:
                open(question[11:], "x").close()
            except FileExistsError:
                return b"again"
            time.sleep(0.1)  # meanwhile the other process stands still
            os._exit(3)
        if question == b"environment":
            return " ".join(sorted(os.environ)).encode()
        return opening + question.upper()

    return answer


if __name__ == "__main__":
    serve(load, cpu_s=0.2, memory_bytes=64 << 20)
