"""Records that share an id, or threads that share a sampler, do not share a coin."""

from __future__ import annotations

import copy
import pickle
import sys
import threading

import pytest
import torch
from torch import nn

import tacit
from tacit.errors import PlanChanged


def test_records_with_one_id_are_sampled_independently():
    """With one coin for 50 rows, the other 49 would tell whether a record took part."""
    ids = torch.arange(100) // 50
    data = tacit.Records(torch.zeros(100, 1), torch.zeros(100), record_ids=ids, public_size=100)
    sampler = tacit.PoissonSampler(data, 0.5, steps=200)
    sizes = {len(batch) for batch in sampler}
    assert len(sizes - {0, 50, 100}) > 5


def test_a_coin_follows_the_record_when_others_are_missing():
    data = tacit.Records(torch.arange(60.0)[:, None], torch.zeros(60), public_size=60)
    whole = tacit.PoissonSampler(data, 0.5, seed=3).next_batch().inputs.flatten().tolist()
    fewer = tacit.PoissonSampler(data.without(7), 0.5, seed=3).next_batch().inputs.flatten()
    assert fewer.tolist() == [x for x in whole if x != 7]


def test_threads_never_draw_one_batch_twice():
    data = (torch.arange(64.0)[:, None], torch.zeros(64))
    sampler = tacit.PoissonSampler(data, 0.5, expected_batch_size=32, steps=1)
    drawn, before = [], sys.getswitchinterval()

    def work() -> None:
        drawn.extend(tuple(sampler.next_batch().indices.tolist()) for _ in range(60))

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert len(set(drawn)) == len(drawn) == 360


def test_a_copied_batch_is_the_same_draw():
    data = tacit.Records(torch.randn(40, 3), torch.arange(40) % 2, public_size=40)
    sampler = tacit.PoissonSampler(data, 0.5, steps=4)
    mechanism = tacit.Mechanism(tacit.PerSampleClip(1.0), sampler, 5.0)
    ledger, model = tacit.Ledger(None, tacit.Budget(8.0, 1e-5)), nn.Linear(3, 2)
    loss, batch = tacit.losses.CrossEntropy(), sampler.next_batch()
    copies = [copy.copy(batch), copy.deepcopy(batch)]
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(batch)
    ledger.release(mechanism.privatise(model, loss, batch), into=model)
    for other in copies:
        with pytest.raises(PlanChanged, match="released already"):
            ledger.release(mechanism.privatise(model, loss, other), into=model)
