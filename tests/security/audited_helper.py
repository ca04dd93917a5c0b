"""The process in which grammars are tried, with the audit watching it: anything but `compile` that is forbidden is
added to
`complaints(parent's id)`, where the server under test finds it."""

from __future__ import annotations

import os
import runpy
import tempfile
from collections.abc import Callable
from pathlib import Path

from millrace.runtime.processes import helper_child
from tests.security.audit import Audit

Answer = Callable[[bytes], bytes]


def complaints(server_pid: int) -> Path:
    """The file. There is none as long as there is nothing to complain of."""
    return Path(tempfile.gettempdir()) / f"millrace-audited-helper-{server_pid}"


class HelperAudit(Audit):
    """Is on during a job, and writes down at once what it sees: a job may end with its process."""

    def watching(self, load: Callable[[bytes], Answer]) -> Callable[[bytes], Answer]:
        """The same `load`, whose answers are watched."""

        def load_watched(opening: bytes) -> Answer:
            answer = load(opening)

            def answer_watched(question: bytes) -> bytes:
                with self.armed():
                    return answer(question)

            return answer_watched

        return load_watched

    def see(self, told: str) -> None:
        self.is_armed = False
        if not self.is_allowed(told):
            with complaints(os.getppid()).open("a") as file:
                file.write(f"helper: {told}\n")
        self.is_armed = True


if __name__ == "__main__":
    audit, serve = HelperAudit(but={"compile"}), helper_child.serve
    helper_child.serve = lambda load, cpu_s, memory_bytes: serve(audit.watching(load), cpu_s, memory_bytes)
    runpy.run_module("millrace.stages.grammar.trial_process", run_name="__main__")
