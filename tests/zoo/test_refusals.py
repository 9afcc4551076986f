"""Programs in which records meet are refused at every piece size, with the place; twins pass.

A refusal says what to do instead. Each recommendation is followed here, and must work.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from mixing_models import (
    CLASSES,
    FEATURES,
    RECORDS,
    REFUSALS,
    WIDTH,
    Network,
    Normalised,
    Refusal,
    class_loss,
)
from reference import Start, record_gradients
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers_text import gpt2, mixtral_loop
from zoo_case import Case, next_token_loss, text_to_continue

import tacit
from tacit.errors import MixesRecords, TacitError, UnsupportedModule
from tacit.sampling.poisson import Poisson
from tacit.sampling.sampler import batch_of

PIECES = [None, 1, 2, 3]


@pytest.fixture(params=REFUSALS.values(), ids=REFUSALS.keys())
def refusal(request) -> Refusal:
    return request.param


def ask(
    model: nn.Module, loss: Callable = class_loss, piece: int | None = None, inputs=None
) -> tacit.queries.BoundedGradient:
    """Clip the gradients of a few records; some of their entries are missing, hence zero."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(RECORDS, FEATURES, generator=generator)
    rows[0, -2:] = rows[3, -1:] = 0.0
    labels = torch.arange(RECORDS) % CLASSES
    batch = batch_of(
        rows if inputs is None else inputs,
        labels,
        divisor=1.0,
        scheme=Poisson(0.5),
        max_physical=piece,
    )
    return tacit.PerSampleClip(max_norm=1.0)(model, loss, batch)


def message_of(refusal: Refusal, piece: int | None = None) -> str:
    torch.manual_seed(0)
    with pytest.raises((MixesRecords, UnsupportedModule)) as caught:
        ask(refusal.build(), refusal.loss, piece)
    assert isinstance(caught.value, TacitError)
    return str(caught.value)


@pytest.mark.parametrize("piece", PIECES)
def test_refused_at_every_piece_size(refusal, piece):
    message_of(refusal, piece)


def test_the_message_names_the_culprit(refusal):
    message = message_of(refusal)
    assert re.search(refusal.names, message), message
    places = refusal.places()
    if places is not None:
        file, lines = places
        expected = rf"{re.escape(file)}\D+({'|'.join(map(str, lines))})\b"
        assert re.search(expected, message), f"not {file}, line {lines}: {message}"


def test_the_message_is_the_same_at_every_piece_size(refusal):
    assert len({message_of(refusal, piece) for piece in PIECES}) == 1


def test_refused_every_time(refusal):
    """Being refused once does not make a model known, and thereby accepted."""
    model = refusal.build()
    for _ in range(3):
        with pytest.raises((MixesRecords, UnsupportedModule)):
            ask(model, refusal.loss)


@pytest.mark.parametrize("piece", PIECES)
def test_the_twin_passes(refusal, piece):
    torch.manual_seed(0)
    bounded = ask(refusal.twin(), refusal.twin_loss, piece)
    assert all(total.isfinite().all() for block in bounded.blocks for total in block.sums)


# Remedies ----------------------------------------------------------------------------------------

# What a message recommends for BatchNorm, by the word that it uses.
INSTEAD_OF_BATCH_NORM = {
    "GroupNorm": lambda: nn.GroupNorm(2, WIDTH),
    "LayerNorm": lambda: nn.LayerNorm(WIDTH),
    "evaluation mode": lambda: nn.BatchNorm1d(WIDTH).eval(),
}


def test_what_is_recommended_for_batch_norm_passes():
    message = message_of(REFUSALS["BatchNorm in training"])
    recommended = [norm for word, norm in INSTEAD_OF_BATCH_NORM.items() if word in message]
    assert recommended, f"no way out in: {message}"
    for norm in recommended:
        ask(Normalised(norm()))


def test_batch_norm_in_training_is_refused_again_after_it_passed_in_evaluation():
    model = Normalised(nn.BatchNorm1d(WIDTH)).eval()
    ask(model)
    with pytest.raises(MixesRecords):
        ask(model.train())


def test_every_message_has_a_way_out(refusal):
    """After the culprit and the rule, a message says what to do."""
    verbs = (
        r"\b(use|replace|keep|pass|give|move|remove|compute|write|build|draw|pad|declare|take)\b"
    )
    message = message_of(refusal)
    assert re.search(verbs, message, re.IGNORECASE), message


def nested_rows() -> Tensor:
    return torch.nested.nested_tensor(
        [torch.randn(length, FEATURES) for length in range(2, 2 + RECORDS)], layout=torch.jagged
    )


class MeanOverTime(nn.Module):
    """Takes sequences that are padded with zeros to a fixed length."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Network(torch.tanh)

    def forward(self, rows: Tensor) -> Tensor:
        counted = (rows != 0).any(-1, keepdim=True)
        return self.network((rows * counted).sum(1) / counted.sum(1).clamp(min=1))


def test_nested_tensors_are_refused_and_padding_passes():
    nested = nested_rows()
    with pytest.raises((TacitError, TypeError), match=r"nested.*to_padded_tensor"):
        ask(MeanOverTime(), inputs=nested)
    padded = torch.nested.to_padded_tensor(nested, 0.0, (RECORDS, 10, FEATURES))
    ask(MeanOverTime(), inputs=padded)


def test_a_loop_over_experts_is_refused_and_runs_record_by_record():
    case = Case("mixtral_loop", mixtral_loop, text_to_continue, next_token_loss)
    model, (inputs, targets) = case.model(), case.batch(4)
    start = Start(model, seed=0)
    batch = batch_of(inputs, targets, divisor=1.0, scheme=Poisson(0.5))
    with pytest.raises(MixesRecords, match=r"engine=tacit\.engines\.PerRecord\(\)"):
        tacit.PerSampleClip(max_norm=0.1)(model, case.loss, batch)
    query = tacit.PerSampleClip(max_norm=0.1, engine=tacit.engines.PerRecord())
    (block,) = query(model, case.loss, batch).blocks
    expected = record_gradients(model, case.loss, inputs, targets, start=start)
    sums = dict(zip(map(id, block.parameters), block.sums, strict=True))
    for parameter, total in zip(expected.parameters, expected.clipped_sums(0.1), strict=True):
        torch.testing.assert_close(sums[id(parameter)].double(), total, rtol=1e-4, atol=1e-6)


def require_exact(
    model: nn.Module, rows: Tensor, engine: object = None, reference: nn.Module | None = None
) -> None:
    """The clipped sums are those of gradients that autograd finds record by record.

    `reference` computes the same in another way, which autograd is asked about.
    """
    reference = reference or model
    reference.load_state_dict(model.state_dict())
    labels = torch.arange(len(rows)) % CLASSES
    query = tacit.PerSampleClip(max_norm=0.1, **({} if engine is None else {"engine": engine}))
    batch = batch_of(rows, labels, divisor=1.0, scheme=Poisson(0.5))
    found = [query(model, class_loss, batch) for _ in range(2)]
    parameters = list(model.parameters())
    expected = [torch.zeros_like(p) for p in parameters]
    for row, label in zip(rows.split(1), labels.split(1), strict=True):
        total = class_loss(reference(row), label).sum()
        grads = torch.autograd.grad(total, list(reference.parameters()), materialize_grads=True)
        norm = torch.cat([grad.flatten() for grad in grads]).norm()
        for clipped, grad in zip(expected, grads, strict=True):
            clipped += grad * (0.1 / norm).clamp(max=1.0)
    for bounded in found:
        (block,) = bounded.blocks
        sums = dict(zip(map(id, block.parameters), block.sums, strict=True))
        for parameter, clipped in zip(parameters, expected, strict=True):
            torch.testing.assert_close(sums[id(parameter)].float(), clipped, rtol=1e-4, atol=1e-6)


def python_if(chosen: Tensor, yes: Callable, no: Callable, operands: tuple[Tensor]) -> Tensor:
    return yes(*operands) if chosen else no(*operands)


def conditional(predicate: Callable[[Tensor], Tensor], choose: Callable = torch.cond) -> nn.Module:
    scale = nn.Linear(WIDTH, WIDTH)

    def change(hidden: Tensor) -> Tensor:
        return choose(predicate(hidden), lambda z: scale(z).sin(), lambda z: z.cos(), (hidden,))

    model = Network(change)
    model.scale = scale
    return model


def test_a_branch_of_torch_cond_on_a_private_value_is_refused_and_runs_record_by_record():
    def positive(z: Tensor) -> Tensor:
        return z.mean() > 0

    with pytest.raises(
        MixesRecords, match=r"Tensor\.__bool__.*engine=tacit\.engines\.PerRecord\(\)"
    ):
        ask(conditional(positive))
    rows, reference = torch.randn(RECORDS, FEATURES), conditional(positive, python_if)
    require_exact(conditional(positive), rows, tacit.engines.PerRecord(), reference)


def test_a_branch_of_torch_cond_on_a_public_value_passes():
    public = torch.tensor(2.0)
    reference = conditional(lambda z: public > 1, python_if)
    rows = torch.randn(RECORDS, FEATURES)
    require_exact(conditional(lambda z: public > 1), rows, reference=reference)


class Nested(nn.Module):
    """Builds a jagged tensor in its forward pass, of the rows or of what a layer makes of them."""

    def __init__(self, of_rows: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.of_rows = of_rows

    def forward(self, rows: Tensor) -> Tensor:
        if self.of_rows:
            nested = torch.nested.nested_tensor(list(rows), layout=torch.jagged)
            return self.last(torch.tanh(self.first(nested.sum(1))))
        nested = torch.nested.as_nested_tensor(list(self.first(rows)), layout=torch.jagged)
        return self.last(torch.nested.to_padded_tensor(nested.sin(), 0.0).sum(1))


@pytest.mark.parametrize("of_rows", [False, True])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_in_the_forward_pass_runs_record_by_record(of_rows):
    rows = torch.randn(RECORDS, 4, FEATURES)
    with pytest.warns(UserWarning, match="records of Nested run one by one"):
        require_exact(Nested(of_rows), rows)
    require_exact(Nested(of_rows), rows, tacit.engines.PerRecord())


class Checkpointed(Network):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__(torch.tanh)
        self.use_reentrant = use_reentrant

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.first(rows)
        return checkpoint(
            lambda z: self.last(torch.tanh(z)), hidden, use_reentrant=self.use_reentrant
        )


@pytest.mark.parametrize("engine", [None, tacit.engines.PerRecord()])
def test_reentrant_checkpoints_are_refused_and_the_others_pass(engine):
    rows = torch.randn(RECORDS, FEATURES)
    with pytest.raises(UnsupportedModule, match=r"checkpoint\(\.\.\., use_reentrant=False\)"):
        require_exact(Checkpointed(use_reentrant=True), rows, engine)
    require_exact(Checkpointed(use_reentrant=False), rows, engine)


def test_reentrant_checkpoints_of_transformers_are_refused_and_the_recommendation_passes():
    case = Case("gpt2", gpt2, text_to_continue, next_token_loss)
    model, (inputs, targets) = case.model(), case.batch(4)
    batch = batch_of(inputs, targets, divisor=1.0, scheme=Poisson(0.5))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads()
    with pytest.raises(UnsupportedModule) as caught:
        tacit.PerSampleClip(max_norm=0.1)(model, case.loss, batch)
    line = 'model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": '
    assert line + "False})" in str(caught.value)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    tacit.PerSampleClip(max_norm=0.1)(model, case.loss, batch)


def test_one_hot_labels_of_a_given_width_pass():
    """The operator reads its labels to refuse those out of range; Python sees none of them."""

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return -(F.one_hot(labels, CLASSES) * logits.log_softmax(1)).sum(1)

    def loss_of_the_widest(logits: Tensor, labels: Tensor) -> Tensor:
        return -(F.one_hot(labels) * logits[:, : int(labels.max()) + 1]).sum(1)

    ask(Network(torch.tanh), loss)
    with pytest.raises(MixesRecords):
        ask(Network(torch.tanh), loss_of_the_widest)


def hooked_on_its_weight() -> nn.Module:
    model = Network(torch.tanh)
    model.first.weight.register_hook(lambda gradient: 0.5 * gradient)
    return model


def test_a_hook_on_a_parameter_is_refused_and_runs_record_by_record():
    with pytest.raises(UnsupportedModule, match=r"'first.weight' has a hook.*PerRecord"):
        ask(hooked_on_its_weight())
    rows, labels = torch.randn(RECORDS, FEATURES), torch.arange(RECORDS) % CLASSES
    batch = batch_of(rows, labels, divisor=1.0, scheme=Poisson(0.5))
    tacit.PerSampleClip(max_norm=1.0, engine=tacit.engines.PerRecord())(
        hooked_on_its_weight(), class_loss, batch
    )


class Rotated(nn.Module):
    """Multiplies a spectrum by a weight that is complex, or is viewed as complex."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight, self.network = nn.Parameter(weight), Network(torch.tanh)

    def forward(self, rows: Tensor) -> Tensor:
        weight = self.weight if self.weight.is_complex() else torch.view_as_complex(self.weight)
        return self.network(torch.fft.irfft(torch.fft.rfft(rows) * weight, n=FEATURES))


def test_a_complex_parameter_is_refused_and_a_view_of_a_real_one_passes():
    weight = torch.randn(FEATURES // 2 + 1, dtype=torch.complex64)
    with pytest.raises(UnsupportedModule, match=r"'weight' is complex.*view_as_complex"):
        ask(Rotated(weight))
    ask(Rotated(torch.view_as_real(weight)))


def test_a_hook_that_brings_records_to_a_weight_is_refused():
    class Hooked(Network):
        def forward(self, rows: Tensor) -> Tensor:
            weight = 2 * self.last.weight
            weight.register_hook(lambda gradient: gradient * rows.mean())
            return F.linear(self.first(rows), weight)

    with pytest.raises(MixesRecords, match="backward pass"):
        ask(Hooked(torch.tanh))


# The same verdict, whatever came before ----------------------------------------------------------


class Switched(nn.Module):
    """Harmless until someone turns a switch, as a schedule or a callback may do."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Network(lambda hidden: hidden - self.share * hidden.mean(0))
        self.plain = Network(torch.tanh)
        self.share: float | None = None

    def forward(self, rows: Tensor) -> Tensor:
        return self.plain(rows) if self.share is None else self.network(rows)


def test_a_model_that_begins_to_mix_is_refused_at_that_step():
    model, query = Switched(), tacit.PerSampleClip(max_norm=1.0)
    rows, labels = torch.randn(RECORDS, FEATURES), torch.zeros(RECORDS, dtype=torch.long)
    batch = batch_of(rows, labels, divisor=1.0, scheme=Poisson(0.5))
    for _ in range(5):
        query(model, class_loss, batch)
    model.share = 1e-9
    with pytest.raises((MixesRecords, UnsupportedModule)):
        query(model, class_loss, batch)


def test_mixing_that_needs_more_records_than_the_first_batch_had():
    """Refused at the first batch or at the second, but not let through."""
    model = REFUSALS["mixing in large batches only"].build()
    query = tacit.PerSampleClip(max_norm=1.0)
    rows, labels = torch.randn(RECORDS, FEATURES), torch.zeros(RECORDS, dtype=torch.long)

    def run_both() -> None:
        for count in (3, RECORDS):
            batch = batch_of(rows[:count], labels[:count], divisor=1.0, scheme=Poisson(0.5))
            query(model, class_loss, batch)

    with pytest.raises((MixesRecords, UnsupportedModule)):
        run_both()
