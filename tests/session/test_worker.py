"""The thread for what takes long: bounded, started late, ended soon, and not killed by its jobs."""

from __future__ import annotations

import threading

from kvplan.session.stats import Stats
from kvplan.session.worker import AT_ONCE, Worker


def worker(**options):
    return Worker(name="kvplan-test-worker", stats=Stats(), **{"max_queue": 4, **options})


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "kvplan-test-worker"]


def test_a_session_without_long_jobs_has_no_thread_for_them():
    one = worker()
    assert not threads()
    one.close()
    one.close()


def test_jobs_are_done_in_order_elsewhere():
    one, done, last = worker(), [], threading.Event()
    assert all(one.submit(lambda i=i: done.append((i, threading.get_ident()))) for i in range(3))
    assert one.submit(last.set)
    assert last.wait(5.0)
    assert [i for i, _ in done] == [0, 1, 2]
    assert threading.get_ident() not in {where for _, where in done}
    one.close()
    assert not threads()


def test_a_queue_that_is_full_takes_nothing_more():
    stats = Stats()
    one = Worker(name="kvplan-test-worker", max_queue=2, stats=stats)
    begun, go_on = threading.Event(), threading.Event()
    assert one.submit(lambda: (begun.set(), go_on.wait(5.0)))
    assert begun.wait(5.0)
    assert one.submit(lambda: None)
    assert one.submit(lambda: None)
    assert not one.submit(lambda: None)
    assert stats.snapshot()["overloads"] == 1
    go_on.set()
    one.close()


def test_closing_drops_what_waits_and_takes_nothing_more():
    one, done = worker(), []
    begun, go_on = threading.Event(), threading.Event()
    one.submit(lambda: (begun.set(), go_on.wait(5.0)))
    assert begun.wait(5.0)
    one.submit(lambda: done.append(1))
    closing = threading.Thread(target=one.close)
    closing.start()
    while one.is_open:
        pass
    assert not one.submit(lambda: done.append(2))
    go_on.set()
    closing.join(5.0)
    assert not closing.is_alive()
    assert not done
    assert not threads()


def test_a_job_that_raises_costs_only_itself(caplog):
    stats = Stats()
    one, last = Worker(name="kvplan-test-worker", max_queue=4, stats=stats), threading.Event()
    one.submit(lambda: 1 / 0)
    one.submit(last.set)
    assert last.wait(5.0)
    assert stats.snapshot()["loop_errors"] == 1
    assert "ZeroDivisionError" in caplog.text
    one.close()


def test_at_once_is_at_once():
    done = []
    assert AT_ONCE.submit(lambda: done.append(1))
    assert done == [1]
    assert AT_ONCE.is_open()
    assert AT_ONCE.wake() is None
