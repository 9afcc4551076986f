"""Recorded steps without a GPU: what is read anew, what makes a new recording, what is dropped.

Every step is compiled after two runs, because the run announces a billion of them.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

import pytest
import torch
from engine_checks import assert_same, batch_for, quadratic, recording_engine, sums_of
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import tacit
from tacit import PerSampleClip, Records
from tacit.engines import Automatic, BookKeeping, Recorder, recorder
from tacit.engines.recorder import RecordedStep
from tacit.errors import MixesRecords
from tacit.losses import CrossEntropy
from tacit.queries import LayerFactors

LOSS = CrossEntropy()


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def batches(count: int = 6, size: int = 12):
    torch.manual_seed(0)
    for _ in range(count):
        yield tacit.sampling.batch_of(
            torch.randn(size, 4).double(),
            torch.randint(0, 2, (size,)),
            divisor=1.0,
            scheme=tacit.sampling.Poisson(0.5),
        )


def public() -> Records:
    torch.manual_seed(2)
    return Records(torch.randn(24, 4).double(), torch.randint(0, 2, (24,)), name="public")


def take_steps(query, model: nn.Module, count: int) -> None:
    for batch in batches(count):
        sums_of(query, model, batch, LOSS)


SETTINGS = {
    "flat": lambda step: (0.1 / (step + 1), None),
    "by-layer": lambda step: ([0.1 / (step + 1), 0.02], tacit.by_layer),
    "factors": lambda step: (LayerFactors(public(), 0.1 / (step + 1)), tacit.by_parameter),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("views", [1, 2])
def test_records_weights_and_constants_are_read_anew(setting, views):
    model, engine = network(), recording_engine()
    augmentation = None if views == 1 else tacit.data.Augmentation(views, torch.clone)
    options = {"augmentation": augmentation}
    for step, batch in enumerate(batches(8)):
        norm, blocks = SETTINGS[setting](step)
        one = PerSampleClip(norm, blocks=blocks, engine=engine, **options)
        plain = PerSampleClip(norm, blocks=blocks, engine=BookKeeping(), **options)
        assert_same(sums_of(one, model, batch, LOSS), sums_of(plain, model, batch, LOSS))
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1)
    assert engine.recorder.num_recorded == 1  # one shape, one recording


class Drifting:
    """A planted bug: a rule that says it is the same in each step, and is not."""

    share = 1.0

    def __call__(self, norms_B, max_norm):
        return torch.full_like(norms_B, self.share)

    def __eq__(self, other):
        return isinstance(other, Drifting)

    __hash__ = None.__hash__


def wrong_steps(model, rule, count: int) -> list[int]:
    """The steps in which recorded sums are not those of the model's own steps."""
    engine, wrong = recording_engine(), []
    for step, batch in enumerate(batches(count)):
        rule.share = 1.0 if step < 4 else 0.5
        found = sums_of(PerSampleClip(1e9, rule=rule, engine=engine), model, batch, LOSS)
        plain = PerSampleClip(1e9, rule=rule, engine=BookKeeping())
        expected = sums_of(plain, model, batch, LOSS)
        if not all(torch.allclose(found[n], expected[n]) for n in found):
            wrong.append(step)
    return wrong


def test_a_number_that_was_recorded_for_good_is_caught():
    """The bug shows between two comparisons with the model's own step, and then no more."""
    with pytest.warns(UserWarning, match="differs from the model's own step"):
        wrong = wrong_steps(network(), Drifting(), 8)
    assert wrong == [4]


class Half:
    """Half of the entries are frozen; from the second step on, the other half."""

    def __init__(self, model):
        self.masks = {
            n: (torch.arange(p.numel()) % 2 == 0).view_as(p) for n, p in model.named_parameters()
        }

    def active(self, model):
        return self.masks


def test_masks_that_change_in_place_are_read_anew():
    model = network()
    frozen, engine = Half(model), recording_engine()
    for batch in batches(8):
        found = sums_of(PerSampleClip(0.1, engine=engine, frozen=frozen), model, batch, LOSS)
        plain = PerSampleClip(0.1, engine=BookKeeping(), frozen=frozen)
        assert_same(found, sums_of(plain, model, batch, LOSS))
        for mask in frozen.masks.values():
            mask.logical_not_()
    assert engine.recorder.num_recorded


def test_padding_and_records_that_are_not_finite_add_nothing_to_a_recording():
    model, engine = network(), recording_engine()
    for step, batch in enumerate(batches(6, size=40)):
        batch.records.inputs[step] = torch.nan
        found = sums_of(PerSampleClip(0.1, engine=engine), model, batch.first(35 + step % 2), LOSS)
        plain = PerSampleClip(0.1, engine=BookKeeping())
        assert_same(found, sums_of(plain, model, batch.first(35 + step % 2), LOSS))
    assert engine.recorder.num_recorded == 1


def test_a_setting_of_the_model_makes_another_recording():
    model = nn.Sequential(nn.Linear(4, 5), nn.LeakyReLU(0.1), nn.Linear(5, 2)).double()
    engine = recording_engine()
    query, plain = PerSampleClip(0.1, engine=engine), PerSampleClip(0.1, engine=BookKeeping())
    for step, batch in enumerate(batches(24)):
        model[1].negative_slope = 0.1 if step < 10 else 0.9
        assert_same(sums_of(query, model, batch, LOSS), sums_of(plain, model, batch, LOSS))
    assert engine.recorder.num_recorded == 1  # in the place of the one before


class Scheduled(nn.Module):
    """A forward pass that changes from step to step, which no setting shows."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.schedule = nn.Linear(4, 2), {"scale": 1.0}

    def forward(self, x):
        return self.body(x) * self.schedule["scale"]


def test_a_recording_that_has_become_stale_is_dropped_with_a_warning():
    model, engine = Scheduled().double(), recording_engine()
    query = PerSampleClip(1e9, engine=engine)
    take_steps(query, model, 7)
    model.schedule["scale"] = 3.0
    with pytest.warns(UserWarning, match="differs from the model's own step"):
        take_steps(query, model, 20)
    assert not engine.recorder.num_recorded
    plain = PerSampleClip(1e9, engine=BookKeeping())
    for batch in batches(2):
        assert_same(sums_of(query, model, batch, LOSS), sums_of(plain, model, batch, LOSS))


def test_dropout_is_drawn_anew_in_each_replay():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 50), nn.Dropout(0.5), nn.Linear(50, 2)).double()
    engine = recording_engine()
    query = PerSampleClip(0.3, engine=engine)
    (batch,) = batches(1)
    found = []
    for _ in range(8):
        found.append({n: s.clone() for n, s in sums_of(query, model, batch, LOSS).items()})
    assert engine.recorder.num_recorded
    assert all(not torch.equal(found[-1]["0.weight"], one["0.weight"]) for one in found[:-1])


def test_stages_can_be_switched_off():
    model, engine = network(), Automatic(Recorder(compile=False, capture=False))
    for batch in batches(5):
        sums_of(PerSampleClip(0.1, engine=engine), model, batch, LOSS)
    assert not engine.recorder.num_recorded


def test_a_step_that_cannot_be_traced_runs_as_it_is_and_says_so_once(monkeypatch):
    def fails(step):
        raise RuntimeError("no luck\nand more")

    monkeypatch.setattr(recorder, "compile_step", fails)
    model, query = network(), PerSampleClip(0.1, engine=recording_engine())
    with pytest.warns(UserWarning, match="cannot be .* and runs without that: no luck") as seen:
        take_steps(query, model, 6)
    assert len(seen) == 1
    plain = PerSampleClip(0.1, engine=BookKeeping())
    for batch in batches(2):
        assert_same(sums_of(query, model, batch, LOSS), sums_of(plain, model, batch, LOSS))


def test_roundings_of_a_coarse_arithmetic_are_no_staleness(monkeypatch):
    """In TensorFloat-32 a recording may choose other ReLUs than the step that it was made from."""
    monkeypatch.setattr(recorder, "_difference", lambda expected, found: 0.06)
    for coarse in (True, False):
        monkeypatch.setattr(recorder, "_rounds_coarsely", lambda model, device, c=coarse: c)
        engine = recording_engine()
        with contextlib.nullcontext() if coarse else pytest.warns(UserWarning, match="by 6.0%"):
            take_steps(PerSampleClip(0.1, engine=engine), network(), 5)
        assert bool(engine.recorder.num_recorded) == coarse


def test_constants_made_on_the_cpu_are_made_once_and_moved():
    def work(x):
        mask = x.new_zeros(4, 4)
        mask[1:3] = 2
        drawn = torch.rand(4)  # another one in each step
        return [x * mask + (torch.arange(4) * 2).to(x.device), x + torch.tensor(3.0), drawn]

    graph = make_fx(work)(torch.ones(4, 4, device="meta"))
    recorder.move_constants(graph, torch.device("meta"))
    left = [
        node.target
        for node in graph.graph.nodes
        if node.op == "call_function" and node.meta["val"].device.type == "cpu"
    ]
    assert left == [torch.ops.aten.rand.default]
    sums, plus, _ = graph(torch.ones(4, 4, device="meta"))
    assert sums.device.type == plus.device.type == "meta"


def test_a_finished_run_gives_its_recordings_back():
    queries = [tacit.PerSampleClip(0.1), tacit.Clipless(gradient_clip=0.1)]
    for query in queries:
        records = tacit.Records(torch.randn(40, 4), torch.randint(2, (40,)), 2, public_size=40)
        model = tacit.models.lipschitz_mlp((4,), 2, hidden=(4,))
        tacit.Trainer(
            model,
            LOSS,
            query,
            tacit.PoissonSampler(records, 0.5, steps=6),
            torch.optim.SGD(model.parameters(), lr=0.1),
            tacit.Budget(3.0, 1e-4),
            callbacks=(),
        ).fit()
        recorder = query.recorder if isinstance(query, tacit.Clipless) else query.engine.recorder
        assert not recorder.num_recorded


def test_an_unrecorded_batch_of_another_shape_is_not_confused():
    model, engine = network(), recording_engine()
    query, plain = PerSampleClip(0.1, engine=engine), PerSampleClip(0.1, engine=BookKeeping())
    for size in (8, 8, 8, 8, 3, 8, 3, 3, 3, 8):
        batch = batch_for(torch.randn(size, 4).double())
        found, expected = (sums_of(q, model, batch, quadratic) for q in (query, plain))
        assert_same(found, expected)


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.inner = 1.0, nn.CrossEntropyLoss(reduction="none")

    def forward(self, outputs, targets):
        return self.weight * self.inner(outputs, targets)


CHANGES = {
    "number of the loss": lambda model, loss: setattr(loss, "weight", 3.0),
    "setting of a part of the loss": lambda m, loss: setattr(loss.inner, "label_smoothing", 0.5),
    "hook of a layer": lambda model, _: model[1].register_forward_hook(lambda *io: 2 * io[-1]),
    "forward of a layer": lambda model, _: setattr(model[1], "forward", torch.sin),
    "forward of the user's": lambda model, _: setattr(model[1], "forward", lambda x: x * x),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_model_and_loss_compute_with_is_read_anew(change):
    model, loss, engine = network(), Weighted(), recording_engine()
    for step, batch in enumerate(batches(9)):
        if step == 7:  # between two comparisons with the model's own step
            CHANGES[change](model, loss)
        recorded = sums_of(PerSampleClip(1e9, engine=engine), model, batch, loss)
        plain = sums_of(PerSampleClip(1e9, engine=BookKeeping()), model, batch, loss)
        assert_same(recorded, plain)
        assert step < 3 or step >= 7 or engine.recorder.num_recorded == 1


def test_a_rule_without_a_hash_can_be_recorded():
    @dataclass
    class Share:
        share: float

        def __call__(self, norms_B, max_norm):
            return torch.full_like(norms_B, self.share)

    model, engine, rule = network(), recording_engine(), Share(1.0)
    for step, batch in enumerate(batches(9)):
        rule.share = 1.0 if step < 7 else 0.5
        recorded = sums_of(PerSampleClip(1e9, rule=rule, engine=engine), model, batch, LOSS)
        plain = PerSampleClip(1e9, rule=rule, engine=BookKeeping())
        assert_same(recorded, sums_of(plain, model, batch, LOSS))


class Writing:
    """A source of rows that leaves them in a model, from the moment that it is given one."""

    model: nn.Module | None = None

    def __len__(self) -> int:
        return 12

    def read_rows(self, rows):
        x = torch.ones(len(rows), 4).double()
        if self.model is not None:
            self.model.register_buffer("rows", x)
        return x, torch.zeros(len(rows), dtype=torch.int64)


def test_what_a_source_of_rows_writes_to_the_model_is_seen_in_replayed_steps():
    source, model, engine = Writing(), network(), recording_engine(after=1)
    query, (batch,) = PerSampleClip(1.0, engine=engine), batches(1)
    records = Records.lazy(source)
    for _ in range(4):
        query(model, LOSS, replace(batch, records=records))
    assert engine.recorder.num_recorded == 1
    source.model = model
    with pytest.raises(MixesRecords, match="buffer 'rows' was written"):
        query(model, LOSS, replace(batch, records=records))


class Capturing(Recorder):
    """Captures on a CPU, where a captured step is the step itself."""

    def captures(self, device):
        return True

    def _captured(self, work, batch):
        return work


def test_a_step_that_cannot_be_compiled_is_captured():
    def work(parameters, batch):
        (x,) = batch
        return {"sum": x * (2.0 if float(x.sum()) > 0 else 1.0)}  # reads a value

    recorder = Capturing()
    recorder.expect(10**9)
    model, x = nn.Linear(2, 2), torch.ones(3)
    with pytest.warns(UserWarning, match="cannot be compiled"):
        found = [recorder(RecordedStep(model, "reads", {}, [x], work)) for _ in range(5)]
    assert torch.equal(found[-1]["sum"], 2 * x)
    assert recorder.num_recorded == 1
