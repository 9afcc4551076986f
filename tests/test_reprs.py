"""What a user makes has a repr that says what it is and shows no record, key or seed."""

from __future__ import annotations

import torch
from torch import nn

import tacit

SECRET = 123456.75


def test_reprs_say_what_an_object_is_and_show_no_record() -> None:
    inputs = torch.full((64, 4), SECRET)
    records = tacit.Records(inputs, torch.arange(64) % 2, num_classes=2, public_size=64)
    model = nn.Linear(4, 2)
    budget = tacit.Budget(epsilon=3.0, delta=1e-3)
    sampler = tacit.PoissonSampler(records, expected_batch_size=16, steps=2, seed=987654321)
    query = tacit.PerSampleClip(max_norm=0.5)
    mechanism = tacit.Mechanism(query, sampler, noise_multiplier=20.0)
    batch = sampler.next_batch()
    loss = tacit.losses.CrossEntropy()
    pending = mechanism.privatise(model, loss, batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = tacit.Trainer(model, loss, query, sampler, optimizer, budget, callbacks=())
    with tacit.Ledger(None, budget) as ledger:
        made = [
            *(records, budget, sampler, sampler.scheme, batch, query, mechanism, pending, loss),
            *(ledger, trainer, trainer.plan, trainer.fit()),
            tacit.FixedSizeSampler(records, 8, steps=1),
            tacit.MiniSetSampler(records, 8, steps=1, chosen=1),
            tacit.ShuffleSampler(records, 8, steps=1),
            tacit.BatchClip(1.0, 8),
            tacit.Clipless(),
            *(tacit.AdaptiveNorm(1.0), tacit.Normalise(), tacit.Noise(2.0), tacit.GlobalNoise()),
            *(tacit.HeldOut(records), tacit.LedgerRun(), tacit.MovingAverage(0.9)),
            *(tacit.PublicStatistics(records, 8), tacit.ReleasedStatistics(records, 5.0)),
            tacit.RandomCropFlip(2),
            tacit.lipschitz.propagate(tacit.models.lipschitz_mlp((4,), 2), loss, (4,)),
            tacit.lipschitz.audit_layer(nn.Flatten(), (4,)),
            *(tacit.engines.PerRecord(), tacit.engines.BookKeeping(), tacit.engines.Automatic()),
        ]
        shown = {type(each).__name__: repr(each) for each in made}
    for kind, text in shown.items():
        assert kind in text, text
        assert " object at 0x" not in text, kind
        assert len(text) < 1500, text
        assert "123456" not in text, text
        assert "987654321" not in text, text
