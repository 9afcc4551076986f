"""A checkpoint that was cut, changed or made up is refused by name, and runs no code."""

from __future__ import annotations

import random
from collections import Counter, defaultdict

import pytest
import torch
from small_trainer import small_trainer
from torch import nn

import tacit
from tacit.errors import CheckpointRefused, PrivateStatistics, TacitError
from tacit.training import Checkpoint, LedgerRun, MovingAverage
from tacit.training.checkpoint import FILE, check_state, read_checkpoint, restore_state
from tacit.training.state_file import read_state, write_state


def trainer_on(folder, **more):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return small_trainer(
        model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3]),
        moving_average=MovingAverage(0.9),
        query=tacit.PerSampleClip(tacit.AdaptiveNorm(1.0, count_noise=30.0)),
        ledger=LedgerRun(folder / "ledger.sqlite", "run"),
        checkpoint=Checkpoint(folder),
        **more,
    )


class StopAtTwo(tacit.Callback):
    def on_step(self, trainer, step):
        if step == 2:
            trainer.stop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    trainer_on(folder, callbacks=[StopAtTwo()]).fit()
    return folder


def test_values_come_back_as_they_were(tmp_path):
    state = {
        "numbers": [0, -1, 2**70, 1.5, float("inf"), float("-inf"), 1e-310],
        "others": (None, True, "text ∑", [], (), {}),
        "keys": {0: "a", "0": "b", -3: {"tensor": "not one"}},
        "counter": Counter([2, 5, 5]),
        "tensors": [
            torch.arange(6, dtype=dtype).reshape(2, 3)
            for dtype in (torch.float64, torch.bfloat16, torch.int8, torch.int64, torch.float16)
        ],
        "odd": [torch.tensor(3.0), torch.empty(0, 4), torch.ones(3, 2).T, torch.tensor([True])],
    }
    shared = torch.randn(4)
    state["shared"] = [shared, shared[:2]]
    write_state(tmp_path / "x", state)
    found = read_state(tmp_path / "x")
    assert list(found) == list(state)
    for name in ("numbers", "others", "keys", "counter"):
        assert found[name] == state[name]
        assert type(found[name]) is type(state[name])
    for name in ("tensors", "odd", "shared"):
        for a, b in zip(found[name], state[name], strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            assert torch.equal(a, b)
    write_state(tmp_path / "x", {"nan": float("nan"), "default": defaultdict(dict, {1: {}})})
    found = read_state(tmp_path / "x")
    assert found["nan"] != found["nan"]
    assert found["default"] == {1: {}}
    assert [file.name for file in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, lambda x: x, nn.Linear(1, 1), b"bytes", 1j, {(1, 2): 3}, {1.5: 2}],
    ids=lambda value: type(value).__name__,
)
def test_other_values_are_refused_and_the_file_stays(value, tmp_path):
    write_state(tmp_path / "x", {"a": 1})
    with pytest.raises(ValueError, match=r"a'/0 is a \w+, which a checkpoint cannot hold"):
        write_state(tmp_path / "x", {"a": [value]})
    assert read_state(tmp_path / "x") == {"a": 1}


def test_cut_and_changed_files_are_refused(folder, tmp_path):
    whole = (folder / FILE).read_bytes()
    chance = random.Random(0)
    for length in [0, 1, 7, 8, 9, *(chance.randrange(len(whole)) for _ in range(60))]:
        (tmp_path / FILE).write_bytes(whole[:length])
        with pytest.raises(CheckpointRefused, match="cannot be read"):
            read_checkpoint(tmp_path)
    for _ in range(400):
        changed = bytearray(whole)
        for _ in range(chance.choice([1, 1, 2, 8])):
            changed[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        if changed == whole:
            continue
        (tmp_path / FILE).write_bytes(changed)
        with pytest.raises(CheckpointRefused, match="cannot be read"):
            read_checkpoint(tmp_path)
    for content in (whole + b"x", b"\x80\x04", bytes(100), b"\xff" * 100, b"{}", whole * 2):
        (tmp_path / FILE).write_bytes(content)
        with pytest.raises(CheckpointRefused, match="cannot be read"):
            read_checkpoint(tmp_path)


ODD = [None, -1, 2**80, 1.5, "text", [], {}, [[]], {"a": 1}, torch.zeros(3), float("nan"), True]


def changed_at_random(value, chance):
    """The same tree with one place replaced, removed or added."""
    if isinstance(value, dict | list | tuple) and value and chance.random() < 0.9:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = chance.choice(list(keys))
        copy = dict(value) if isinstance(value, dict) else list(value)
        action = chance.random()
        if action < 0.15:
            del copy[key]
        elif action < 0.25 and isinstance(copy, dict):
            copy["more"] = chance.choice(ODD)
        else:
            copy[key] = changed_at_random(value[key], chance)
        return copy
    return chance.choice(ODD)


def test_a_file_that_somebody_made_up_is_refused_or_fits(folder, tmp_path):
    """With a right checksum: whatever its tree holds, nothing but a refusal leaves."""
    original, chance = read_state(folder / FILE), random.Random(1)
    trainer, refused = trainer_on(folder), 0
    for _ in range(300):
        write_state(tmp_path / FILE, changed_at_random(original, chance))
        try:
            stored = read_checkpoint(tmp_path)
            check_state(stored, trainer)
            restore_state(stored, trainer)
        except TacitError:
            refused += 1
    assert refused > 200


def test_a_scheduler_takes_no_method_from_a_file(folder, tmp_path):
    state = read_state(folder / FILE)
    state["parts"]["scheduler"]["step"] = "mine"
    write_state(tmp_path / FILE, state)
    trainer = trainer_on(folder)
    with pytest.raises(CheckpointRefused, match="the scheduler has other settings"):
        restore_state(read_checkpoint(tmp_path), trainer)
    assert callable(trainer.scheduler.step)


def test_a_checkpoint_holds_what_was_released_and_no_record(folder):
    """The names of everything in it: a new one must be thought about before it is written."""
    state = read_state(folder / FILE)
    assert set(state) == {"ledger", "progress", "described", "model", "parts"}
    assert set(state["ledger"]) == {"ledger", "head", "run", "name", "attempt", "events"}
    assert set(state["progress"]) == {
        "step",
        "seconds",
        "ended",
        "seeded",
        "resumed",
        "notes",
        "history",
    }
    assert set(state["parts"]) == {"optimizer", "scheduler", "moving average", "query", "mechanism"}
    assert set(state["parts"]["query"]) == {"paths"}
    assert state["parts"]["mechanism"] == {"steps": 2}
    assert set(state["model"]["tensors"]) == {"weight", "bias"}


def test_private_statistics_are_not_written(tmp_path):
    """Frozen ones, of which nobody said where they come from."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    model(torch.randn(9, 4))
    model[1].eval()
    more = {"ledger": tmp_path / "ledger.sqlite", "checkpoint": Checkpoint(tmp_path)}
    with pytest.raises(PrivateStatistics):
        small_trainer(model, **more).fit()
    assert not (tmp_path / FILE).exists()
    tacit.statistics.declare_public(model)
    assert small_trainer(model, **more).fit().steps == 4
