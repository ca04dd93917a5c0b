"""What the kernel ends first when memory runs out: a process that can be replaced."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from millrace.runtime.processes import oom_score
from millrace.runtime.processes.child import Child
from millrace.runtime.processes.helper_pool import HelperPool
from millrace.runtime.processes.oom_score import ENGINE, HELPER, MOST, raise_oom_score

ROOT = Path(__file__).parents[3]
OWN = Path("/proc/self/oom_score_adj")

pytestmark = pytest.mark.skipif(not OWN.exists(), reason="this system has no such score")


def score(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


@pytest.mark.slow
def test_a_child_and_a_helper_are_ended_before_their_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    own = int(OWN.read_text())

    async def main() -> None:
        helpers = HelperPool("tests.runtime.answering", b"")
        child = await Child.start("tests.runtime.processes.joined_child", [], os.environ)
        try:
            await helpers.ask(b"one")
            assert [score(pid) for pid in helpers.pids] == [min(MOST, own + HELPER)]
            await asyncio.get_running_loop().sock_recv(child.sock, 1)
            assert score(child.pid) == min(MOST, own + ENGINE) and int(OWN.read_text()) == own
        finally:
            child.sock.close()
            assert await asyncio.wait_for(child.wait(), 20.0) == "exit status 0"
            await helpers.aclose()

    asyncio.run(asyncio.wait_for(main(), 60.0))


def test_a_score_stays_within_its_range_and_its_lack_is_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "score"
    monkeypatch.setattr(oom_score, "FILE", str(file))
    raise_oom_score(ENGINE)
    assert not file.exists()
    for before, after in ((0, 500), (-500, 0), (900, 1000)):
        file.write_text(f"{before}\n")
        raise_oom_score(ENGINE)
        assert int(file.read_text()) == after
