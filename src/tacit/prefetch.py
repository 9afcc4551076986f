"""Reading ahead: threads and worker processes that read the next rows while a step runs.

A sampler decides which rows are read, and a reader only gets their numbers. `HeldRows` is what a
batch has read; which rows it delivers is decided by the indices that it is asked for, so rows that
were read ahead and are not used change nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, nullcontext, suppress
from functools import partial
from itertools import cycle, islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from tacit.columns import LazyColumn, LazyRows, Reading, columns_of
from tacit.errors import DataError, TacitError
from tacit.pytrees import Tree, map_tensors
from tacit.sources import DatasetRows

Request = TypeVar("Request")
Result = TypeVar("Result")
Rows = tuple[Tensor, bytes | None]  # row numbers, and the key of the items' own draws
Values = list[list[Tensor]]  # of each group of columns, all its tensors at some rows


class HeldRows:
    """The rows of one batch, read once for all columns of the records.

    Unless it was filled it holds what was asked for last: a batch that is taken in pieces is read
    in pieces. `key` is that of the items' own draws.
    """

    def __init__(self, columns: list[LazyColumn], key: bytes | None = None) -> None:
        self._columns = columns
        self._groups = list(dict.fromkeys(column.lazy for column in columns))
        self._key, self._filled = key, False
        self._rows = torch.empty(0, dtype=torch.int64)
        self._asked: tuple[Tensor, Tensor] | None = None
        self._values: dict[tuple[LazyRows, int], Tensor] = {}

    def fill(self, rows: Tensor, values: Values) -> None:
        """Hold rows that were read ahead, and keep them."""
        self._filled = True
        self._hold(rows, values)

    def gather(self, tree: Tree, indices: Tensor) -> Tree:
        """The records at `indices`, in the structure of a tree of tensors and columns."""
        places = self._places(indices)

        def at(leaf: Tensor) -> Tensor:
            if isinstance(leaf, LazyColumn):
                return self._values[leaf.lazy, leaf.place].index_select(0, places)
            return leaf.index_select(0, indices)

        return map_tensors(at, tree)

    def _places(self, indices: Tensor) -> Tensor:
        if self._asked is None or self._asked[0] is not indices:
            wanted = indices.cpu()
            missing = wanted[~torch.isin(wanted, self._rows)].unique()
            if len(missing) or not self._values:
                if not self._filled:
                    missing = wanted.unique()
                    self._rows, self._values = missing[:0], {}
                values = [group.read(missing, self._key) for group in self._groups]
                self._hold(missing, values)
            order = torch.argsort(self._rows)
            places = order[torch.searchsorted(self._rows[order], wanted)].to(indices.device)
            self._asked = indices, places
        return self._asked[1]

    def _hold(self, rows: Tensor, values: Values) -> None:
        of_group = dict(zip(self._groups, values, strict=True))
        for column in self._columns:
            key = column.lazy, column.place
            new = column.delivered(of_group[column.lazy][column.place])
            old = self._values.get(key)
            self._values[key] = new if old is None else torch.cat([old, new])
        self._rows = torch.cat([self._rows, rows])


def read_ahead(
    columns: list[LazyColumn], requests: Iterator[Rows]
) -> Generator[tuple[Tensor, Values], None, None] | None:
    """What `HeldRows` takes, request by request, read while the caller does something else.

    None where reading ahead was not asked for. Arrays and sources are read by a thread, and
    datasets by their `num_workers` processes: a dataset in a thread would draw from the generators
    that the step draws from.
    """
    groups = list(dict.fromkeys(column.lazy for column in columns))
    own = [group for group in groups if isinstance(group.source, DatasetRows)]
    readings = [group.reading for group in groups]
    if min(r.prefetch for r in readings) < 1 or any(not g.reading.num_workers for g in own):
        return None
    together = Reading(
        max(r.num_workers for r in readings),
        max(r.prefetch for r in readings),
        max(r.timeout for r in readings),
    )
    pinned = any(column.device.type == "cuda" for column in columns)
    remote = partial(_read_groups, own) if own else None

    def read(request: Rows, in_worker: Callable[[Any], Any] | None) -> tuple[Tensor, Values]:
        by_worker = iter(in_worker(request) if in_worker is not None else ())
        values = [
            next(by_worker) if group in own else group.read(*request)  # in the order of `groups`
            for group in groups
        ]
        if pinned:
            values = [[t.pin_memory() for t in group] for group in values]
        return request[0], values

    return _ahead(read, remote, requests, together)


def rows_in_order(tree: Tree, num_rows: int, size: int, device: torch.device) -> Iterator[Tree]:
    """A tree of tensors and columns, `size` rows at a time, in memory; the next are read ahead.

    One piece alone is read by the caller: there is nothing to do meanwhile.
    """
    columns = columns_of(tree)
    parts = [torch.arange(i, min(i + size, num_rows)) for i in range(0, num_rows, size)]
    requests: Iterator[Rows] = ((part, None) for part in parts)
    fetched = read_ahead(columns, requests) if columns and len(parts) > 1 else None
    with nullcontext() if fetched is None else closing(fetched):
        for part in parts:
            held = HeldRows(columns)
            if fetched is not None:
                held.fill(*next(fetched))
            yield held.gather(tree, part.to(device))


def _read_groups(groups: list[LazyRows], request: Rows) -> Values:
    return [group.read(*request) for group in groups]


def _ahead(
    read: Callable[[Request, Any], Result],
    remote: Callable[[Any], Any] | None,
    requests: Iterator[Request],
    how: Reading,
) -> Generator[Result, None, None]:
    """read(request) for each request, in order; at most `prefetch` of them are held or under way.

    With `remote`, each thread has a worker process that calls it. Whatever ends the iteration ends
    threads and processes, and drops what was read.
    """
    pid = os.getpid()
    lanes: list[_Lane] = []
    waiting: deque[_Lane] = deque()
    try:
        for _ in range(how.num_workers if remote is not None else 1):
            lanes.append(_Lane(read, remote))
        for lane in lanes:  # all processes are forked before the first thread starts
            lane.start()
        turns, ahead = cycle(lanes), max(how.prefetch, len(lanes))

        def ask() -> None:
            for request in islice(requests, ahead - len(waiting)):
                waiting.append(next(turns))
                waiting[-1].todo.put(request)

        ask()
        while waiting:
            found = waiting.popleft().result(how.timeout)
            ask()
            yield found
            if os.getpid() != pid:
                raise RuntimeError(
                    "an iteration that reads ahead was carried into a forked process, which has "
                    "none of its readers; iterate over the sampler again there"
                )
    finally:
        if os.getpid() == pid:
            for lane in lanes:
                lane.stop()


class _Lane:
    """A thread that reads one request after the other, by itself or through its own process."""

    def __init__(self, read: Callable[..., Any], remote: Callable[[Any], Any] | None) -> None:
        self._read, self._worker = read, None if remote is None else _Worker(remote)
        self.todo: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._stopped = threading.Event()
        # A daemon: a read that hangs must not keep the program from ending.
        self._thread = threading.Thread(target=self._run, name="tacit-read-ahead", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        in_worker = None if self._worker is None else self._worker.ask
        while (request := self.todo.get()) is not None and not self._stopped.is_set():
            try:
                self._done.put((self._read(request, in_worker), None))
            except BaseException as error:
                self._done.put((None, error))

    def result(self, timeout: float) -> Any:
        try:
            value, error = self._done.get(timeout=timeout)
        except queue.Empty:
            raise DataError(
                f"reading the records of a batch took longer than {timeout:g} s, so the run ends; "
                "look for what hangs in the dataset, or give Records.lazy(..., timeout=...)"
            ) from None
        if error is None:
            return value
        if isinstance(error, TacitError):
            raise error
        raise DataError(f"records cannot be read: {type(error).__name__}: {error}") from error

    def stop(self) -> None:
        self._stopped.set()
        self.todo.put(None)
        if self._worker is not None:
            self._worker.stop()


class _Worker:
    """A process that answers requests by `work(request)`. It gets row numbers and nothing else."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        context = multiprocessing.get_context()
        self._connection, theirs = context.Pipe()
        arguments = (theirs, self._connection, work)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, request: Rows) -> Values:
        try:
            rows, key = request
            self._connection.send((rows.numpy(), key))
            kind, answer = self._connection.recv()
        except (EOFError, OSError) as error:
            self._process.join(5)
            raise DataError(
                f"a process that reads records ended with exit code {self._process.exitcode}, as "
                "one does that is killed or runs out of memory; give fewer num_workers, or none "
                "to see where it happens"
            ) from error
        if kind == "error":
            raise DataError(answer)
        return [[_unpacked(packed) for packed in group] for group in answer]

    def stop(self) -> None:
        with suppress(OSError, ValueError):
            self._process.kill()
            self._process.join(5)


def _serve(connection: Any, theirs: Any, work: Callable[[Any], Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that trains decides
    torch.set_num_threads(1)  # PyTorch's own threads do not survive a fork
    theirs.close()  # so that reading ends when the process that trains is gone
    answer: tuple[str, Any]
    with closing(connection), suppress(EOFError, OSError):
        while True:
            rows, key = connection.recv()
            try:
                values = work((torch.from_numpy(rows), key))
                answer = "values", [[_packed(t) for t in group] for group in values]
            except Exception as error:
                message = str(error) if isinstance(error, TacitError) else repr(error)
                answer = "error", message
            connection.send(answer)


# Tensors cross as bytes: shared memory is scarce in containers, and a full one kills the process.
def _packed(tensor: Tensor) -> tuple[Any, torch.dtype, torch.Size]:
    return tensor.contiguous().flatten().view(torch.uint8).numpy(), tensor.dtype, tensor.shape


def _unpacked(packed: tuple[Any, torch.dtype, torch.Size]) -> Tensor:
    data, dtype, shape = packed
    return torch.from_numpy(data).view(dtype).reshape(shape)
