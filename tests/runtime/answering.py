"""A helper process for tests: it answers requests in capitals, or misbehaves on request."""

from __future__ import annotations

import os

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
        if question == b"environment":
            return " ".join(sorted(os.environ)).encode()
        return opening + question.upper()

    return answer


if __name__ == "__main__":
    serve(load, cpu_s=0.2, memory_bytes=64 << 20)
