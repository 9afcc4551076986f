"""A forked process whose result its parent reads."""

from __future__ import annotations

import os
import pickle
import sys


class Forked:
    """`os.fork` with a result: the child runs `work()` and sends back what it returns."""

    def __init__(self, work) -> None:
        self._read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._read)
            try:
                answer = ("done", work())
            except BaseException as error:
                answer = ("raised", f"{type(error).__name__}: {error}")
            os.write(write, pickle.dumps(answer))
            sys.stdout.flush()
            os._exit(0)
        os.close(write)

    def result(self):
        with os.fdopen(self._read, "rb") as pipe:
            answer = pickle.loads(pipe.read())
        os.waitpid(self.pid, 0)
        return answer
