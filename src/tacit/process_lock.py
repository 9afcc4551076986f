"""A lock for the threads of one process, which a forked child finds open."""

from __future__ import annotations

import os
import threading
import weakref


class ProcessLock:
    """An RLock. A child that is forked while another thread holds it would wait forever, since that
    thread does not exist there; so in a child it is a new one."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _all.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


_all: weakref.WeakSet[ProcessLock] = weakref.WeakSet()


def _renew() -> None:
    for lock in _all:
        lock._lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
