"""How far loading a model is."""

import pytest

from millrace.runtime.startup.load_progress import LoadProgress
from millrace.runtime.startup.phases import Phases


def test_progress_has_bytes_by_file_rate_and_time_left():
    now = [10.0]
    progress = LoadProgress(lambda: now[0])
    assert progress.state().to_json()["percent"] is None and progress.state().to_text() == "starting"
    progress.begin("read", {"a": 6_000_000, "b": 2_000_000})
    now[0] = 12.0
    progress.add("a", 1_500_000)
    progress.add("b", 500_000)
    state = progress.state()
    assert state.files == {"a": (1_500_000, 6_000_000), "b": (500_000, 2_000_000)}
    assert state.to_json() == {
        "phase": "read",
        "num_bytes": 2_000_000,
        "total_bytes": 8_000_000,
        "percent": 25.0,
        "mb_per_s": 1.0,
        "seconds_left": 6.0,
    }
    assert state.to_text() == "reading weights, 25 % of 0.0 GB, 1 MB/s, 6 s left"


def test_a_phase_begins_at_zero_and_a_download_may_grow():
    progress = LoadProgress(lambda: 5.0)
    progress.begin("download")
    progress.set("m", 10, 20)
    progress.set("m", 30, 60)
    assert progress.state().percent == 50.0
    assert progress.state().seconds_left is None  # no time has passed
    progress.begin("pack")
    assert progress.state().files == {} and progress.state().phase == "pack"


def test_the_state_of_another_process_is_told_in_place_of_the_own():
    here, there = LoadProgress(lambda: 0.0), LoadProgress(lambda: 0.0)
    there.begin("read", {"a": 4})
    here.follow(there.state())
    assert here.state() == there.state()


def test_phases_have_a_progress_of_their_clock():
    phases = Phases(lambda: 3.0)
    assert phases.progress.state().seconds == pytest.approx(0.0)
    assert Phases(lambda: 0.0, progress=phases.progress).progress is phases.progress


def test_the_rate_leaves_out_what_was_there_before():
    now = [0.0]
    progress = LoadProgress(lambda: now[0])
    progress.begin("download")
    progress.set("m", 90_000_000, 100_000_000)
    now[0] = 2.0
    progress.set("m", 94_000_000, 100_000_000)
    state = progress.state()
    assert (state.mb_per_s, state.percent, state.seconds_left) == (2.0, 94.0, 3.0)
    progress.begin("read", {"a": 8_000_000})
    now[0] = 3.0
    progress.add("a", 2_000_000)
    assert progress.state().mb_per_s == 2.0
