"""Rows that are read ahead: the same batches, a clear end, and nothing left behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from lazy_data import Items, N, X, Y, as_dict, pair
from test_lazy_records import SAMPLERS, same_batches

import tacit
from tacit import Records
from tacit.errors import DataError
from tacit.training.evaluation import pieces_of


def readers() -> int:
    threads = [t for t in threading.enumerate() if t.name == "tacit-read-ahead" and t.is_alive()]
    return len(threads) + len(multiprocessing.active_children())


@pytest.fixture(autouse=True)
def _nothing_is_left():
    yield
    deadline = time.monotonic() + 5
    if readers():
        gc.collect()
    while readers() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert readers() == 0


def lazy(item=pair, **options) -> Records:
    return Records.lazy(Items(item), public_size=N, **options)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_batches_are_the_same_however_many_are_read_ahead(sampler):
    make, arrays = SAMPLERS[sampler], (X, Y)
    for prefetch in (1, 2, 9):
        one = make(Records.lazy(arrays, prefetch=prefetch, public_size=N), seed=3)
        other = make(Records.lazy(arrays, prefetch=0, public_size=N), seed=3)
        assert same_batches(one, other)
        assert same_batches(one, other)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("workers", [1, 3])
def test_batches_of_worker_processes_are_the_same(sampler, workers):
    make = SAMPLERS[sampler]
    one = make(lazy(as_dict, num_workers=workers), seed=3, pad_to=4)
    assert same_batches(one, make(lazy(as_dict), seed=3, pad_to=4))


def test_random_transforms_draw_the_same_in_workers():
    def item(row):
        return torch.rand(2) + np.random.rand(), 0

    one, other = (
        tacit.PoissonSampler(lazy(item, num_workers=k), 0.5, steps=4, seed=2) for k in (2, 0)
    )
    assert same_batches(one, other)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("after", [1, 3])
def test_draws_that_are_not_handed_out_are_none(sampler, after):
    """A pass that stops early leaves the sampler as it would be without reading ahead."""
    make = SAMPLERS[sampler]
    ahead = make(Records.lazy((X, Y), prefetch=3, public_size=N), seed=4)
    plain = make(Records(X, Y, public_size=N), seed=4)
    for one in (ahead, plain):
        batches = iter(one)
        for _ in range(after):
            next(batches)
        assert one._steps_drawn == after
        batches.close()
    one, other = ahead.next_batch(), plain.next_batch()  # the same pass goes on
    assert torch.equal(one.indices, other.indices)
    assert torch.equal(one.inputs, other.inputs)
    assert same_batches(ahead, plain)


def test_new_randomness_in_the_middle_drops_what_was_drawn_ahead():
    sampler = SAMPLERS["shuffle"](Records.lazy((X, Y), prefetch=3, public_size=N), seed=4)
    batches = iter(sampler)
    next(batches)
    sampler.reseed(9)
    plain = SAMPLERS["shuffle"](Records(X, Y, public_size=N), seed=9)
    for _ in range(3):
        one, other = next(batches), plain.next_batch()
        assert torch.equal(one.indices, other.indices)
        assert torch.equal(one.inputs, X[one.indices])


def test_a_run_that_stops_is_charged_as_without_reading_ahead(tmp_path):
    charged = {}
    for prefetch in (0, 4):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 3)
        sampler = tacit.PoissonSampler(
            Records.lazy((X, Y), prefetch=prefetch, public_size=N),
            expected_batch_size=8,
            steps=20,
            seed=1,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mechanism = tacit.Mechanism(tacit.PerSampleClip(1.0), sampler, 3.0, seed=1)
        with tacit.Ledger(tmp_path / f"{prefetch}.sqlite", tacit.Budget(3.0, 1e-3)) as ledger:
            ledger.begin(mechanism.plan)
            for step, batch in enumerate(sampler):
                pending = mechanism.privatise(model, tacit.losses.CrossEntropy(), batch)
                ledger.release(pending, into=model)
                optimizer.step()
                if step == 4:
                    break
            charged[prefetch] = ledger.run_status(), model.weight.detach().clone()
    assert charged[0][0] == charged[4][0]
    assert torch.equal(charged[0][1], charged[4][1])


def test_at_most_so_many_batches_are_read_ahead():
    read = []

    class Source:
        def __len__(self):
            return N

        def read_rows(self, rows):
            read.append(len(rows))
            return X[rows], Y[rows]

    sampler = tacit.PoissonSampler(Records.lazy(Source(), prefetch=3, public_size=N), 0.5, steps=30)
    read.clear()
    batches = iter(sampler)
    for taken in range(1, 6):
        next(batches)
        time.sleep(0.05)
        assert taken < len(read) <= taken + 3
    batches.close()


# ---- ends ----------------------------------------------------------------------------------------


def consume(records, steps=4):
    for batch in tacit.PoissonSampler(records, 0.9, steps=steps):
        _ = batch.inputs


def dies(row):
    if row and multiprocessing.parent_process() is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    return pair(row)


def hangs(row):
    if row and multiprocessing.parent_process() is not None:
        time.sleep(60)
    return pair(row)


def raises(row):
    if row == 9:
        raise KeyError("pixel")
    return pair(row)


def exits(row):
    if row:
        raise SystemExit(3)
    return pair(row)


@pytest.mark.parametrize(
    ("item", "says"),
    [
        (dies, r"ended with exit code -9.*num_workers"),
        (hangs, r"longer than 0.5 s.*timeout"),
        (raises, r"record 9 cannot be read: KeyError: 'pixel' .*private"),
        (exits, r"ended with exit code 3"),
        (lambda row: (torch.ones(1 + (row == 9)), 0), r"record 9 .*max_length"),
    ],
)
def test_a_worker_that_fails_ends_in_one_clear_error(item, says):
    started = time.monotonic()
    with pytest.raises(DataError, match=says):
        consume(lazy(item, num_workers=2, timeout=0.5 if item is hangs else 30))
    assert time.monotonic() - started < 10


def test_a_source_that_fails_or_hangs_in_the_thread_ends_in_one_clear_error():
    class Source:
        def __init__(self, act):
            self.act = act

        def __len__(self):
            return N

        def read_rows(self, rows):
            if threading.current_thread() is not threading.main_thread():
                self.act()
            return X[rows], Y[rows]

    with pytest.raises(DataError, match="ZeroDivisionError: division by zero"):
        consume(Records.lazy(Source(lambda: 1 / 0), public_size=N))
    with pytest.raises(DataError, match=r"longer than 0\.2 s"):
        consume(Records.lazy(Source(lambda: time.sleep(1)), timeout=0.2, public_size=N))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, GeneratorExit])
def test_readers_end_with_the_loop(workers, error):
    records = lazy(num_workers=workers) if workers else Records.lazy((X, Y), public_size=N)

    def stopped():
        for _ in tacit.PoissonSampler(records, 0.5, steps=9):
            assert readers()
            raise error

    with pytest.raises(error):
        stopped()


def test_workers_leave_an_interrupt_to_the_process_that_trains():
    batches = iter(tacit.PoissonSampler(lazy(num_workers=2), 0.5, steps=6))
    next(batches)
    for worker in multiprocessing.active_children():
        os.kill(worker.pid, signal.SIGINT)
    assert len(list(batches)) == 5


def test_an_iteration_that_was_carried_into_a_fork_says_so():
    from tests.forked import Forked

    sampler = tacit.PoissonSampler(Records.lazy((X, Y), public_size=N), 0.5, steps=6)
    batches = iter(sampler)
    next(batches)
    kind, answer = Forked(lambda: len(next(batches))).result()
    assert (kind, "carried into a forked process" in answer) == ("raised", True)
    assert Forked(lambda: len(list(sampler))).result() == ("done", 6)
    assert len(list(batches)) == 5


def test_workers_end_when_the_process_that_trains_is_killed():
    import subprocess
    import sys

    program = (
        "import sys, torch, tacit, multiprocessing\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from lazy_data import Items, pair, N\n"
        "r = tacit.Records.lazy(Items(pair), num_workers=2, public_size=N)\n"
        "for b in tacit.PoissonSampler(r, 0.5, steps=10**6):\n"
        "    print(*[p.pid for p in multiprocessing.active_children()], flush=True)\n"
        "    input()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, os.path.dirname(__file__)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    pids = [int(pid) for pid in child.stdout.readline().split()]
    assert len(pids) == 2
    child.kill()
    child.communicate()

    def alive(pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except FileNotFoundError:
            return False

    deadline = time.monotonic() + 5
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, pids))


def resident(kind: str) -> float:
    """Resident memory in MiB, from /proc."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(kind)) / 1024


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="no /proc")
def test_memory_does_not_grow_with_the_rows_that_were_read(tmp_path):
    rows, width = 1 << 17, 4096  # 2 GiB that take no disk space
    with open(tmp_path / "rows", "wb") as file:
        file.truncate(rows * width * 4)
        file.seek((rows - 1) * width * 4)
        file.write(np.full(width, 3, dtype=np.float32).tobytes())
    array = np.memmap(tmp_path / "rows", np.float32, "r", shape=(rows, width))
    records = Records(array, torch.zeros(rows), public_size=rows)
    assert records.take(slice(rows - 1, None)).read().inputs.eq(3).all()
    before = resident("VmRSS"), resident("RssAnon")
    most = 0.0
    for batch in tacit.PoissonSampler(records, expected_batch_size=1024, steps=60):  # 1 GB read
        assert batch.inputs.shape[1] == width
        most = max(most, resident("VmRSS"))
    assert most - before[0] < 600
    assert resident("RssAnon") - before[1] < 200


class Timed:
    """A source that notes when its rows are read, and by which thread."""

    def __init__(self) -> None:
        self.reads: list[tuple[list[int], str]] = []

    def __len__(self) -> int:
        return N

    def read_rows(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.reads.append((rows.tolist(), threading.current_thread().name))
        return X[rows], Y[rows]


def test_an_evaluation_reads_the_next_records_while_it_computes():
    source = Timed()
    records = Records.lazy(source, prefetch=2, num_classes=3)
    source.reads.clear()
    pieces = pieces_of(records, 16)
    first = next(pieces)
    deadline = time.monotonic() + 5
    while len(source.reads) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [rows for rows, _ in source.reads] == [
        list(range(16)), list(range(16, 32)), list(range(32, N))
    ]  # fmt: skip
    assert {name for _, name in source.reads} == {"tacit-read-ahead"}
    found = [first, *pieces]
    assert torch.equal(torch.cat([piece.inputs for piece in found]), X)
    assert torch.equal(torch.cat([piece.targets for piece in found]), Y)
    assert torch.cat([piece.record_ids for piece in found]).tolist() == list(range(N))


@pytest.mark.parametrize(
    "how",
    [
        {"data": (X, Y)},
        {"data": (X, Y), "prefetch": 0},
        {"data": Items(pair)},
        {"data": Items(pair), "num_workers": 2},
    ],
)
def test_metrics_are_the_same_however_records_are_read(how):
    torch.manual_seed(0)
    model, loss = torch.nn.Linear(3, 3), tacit.losses.CrossEntropy()
    records = Records.lazy(how["data"], num_classes=3, **{k: how[k] for k in how if k != "data"})
    taken = records.take(torch.arange(N - 1, 0, -2))  # rows in an order of their own
    eager = Records(X, Y, 3).take(torch.arange(N - 1, 0, -2))
    for size in (7, 100):
        found = tacit.evaluate(model, taken, loss, batch_size=size)
        assert found == tacit.evaluate(model, eager, loss, batch_size=size)


def test_what_fails_while_it_is_read_ahead_ends_an_evaluation():
    def bad(row: int) -> tuple:
        if row == 30:
            raise OSError("the disk is gone")
        return pair(row)

    for workers in (0, 2):
        records = Records.lazy(Items(bad), num_workers=workers, num_classes=3)
        with pytest.raises(DataError, match="the disk is gone"):
            tacit.evaluate(torch.nn.Linear(3, 3), records, tacit.losses.CrossEntropy(), 8)


def test_an_evaluation_that_is_left_early_leaves_no_reader():
    pieces = pieces_of(Records.lazy(Items(pair), num_workers=2), 8)
    next(pieces)
    assert readers() > 0
    pieces.close()
