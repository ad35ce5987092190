"""Does the deadline fire for stuck work, and only for that?"""

from __future__ import annotations

from ridgeline.server.heartbeat import Progress


def test_idle_is_healthy_for_ever() -> None:
    progress = Progress(30.0)
    assert not progress.is_stuck(1e9)
    progress.work_began(0.0)
    progress.work_ended()
    assert not progress.is_stuck(1e9)


def test_pending_work_without_a_step_is_stuck_after_the_deadline() -> None:
    progress = Progress(30.0)
    progress.work_began(1000.0, 3)
    assert not progress.is_stuck(1030.0)
    assert progress.is_stuck(1030.5)
    progress.step_done(1031.0)
    assert not progress.is_stuck(1060.0)
    progress.work_ended(2)
    assert progress.is_stuck(1062.0)  # one is left
    progress.work_ended()
    assert not progress.is_stuck(9999.0)


def test_more_work_does_not_excuse_a_stuck_engine() -> None:
    progress = Progress(30.0)
    progress.work_began(0.0)
    for second in range(100):
        progress.work_began(float(second))
    assert progress.is_stuck(31.0)


def test_a_new_engine_starts_clean_and_counts_never_fall_below_zero() -> None:
    progress = Progress(30.0)
    progress.work_began(0.0)
    progress.reset()
    assert not progress.is_stuck(100.0)
    progress.work_ended(5)
    progress.work_began(200.0)
    assert progress.num_pending == 1
    assert progress.stalled_s(210.0) == 10.0
