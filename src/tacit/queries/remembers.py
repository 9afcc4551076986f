"""Does a model remember earlier passes? Then records of one pass are in the gradients of the next.

State in buffers and parameters is compared itself (`keeps_nothing`). A model may also keep it in an
attribute of Python's, which nobody can tell from a harmless note. So the same records are given
twice, with others between them, and must give the same both times, with all generators set back
that can be found. What draws from another one does not either: copies of the model, made at one
time, show which it is, and what cannot be copied is not believed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tacit.queries.keeps_nothing import of_weights_alone
from tacit.randomness import GlobalGenerators

Pass = Callable[[nn.Module], Mapping[str, Tensor]]


def remembers(model: nn.Module, one: Pass, between: Pass | None, device: torch.device) -> bool:
    """Whether the pass `one` gives something else after `between`, and not by chance."""
    held = GlobalGenerators.now(device)

    def run(step: Pass, model: nn.Module) -> Mapping[str, Tensor]:
        held.restore(device)
        with _own_generators_set_back(model):
            return step(model)

    try:
        with _held_still(model):
            first = run(one, model)
            if between is not None:
                run(between, model)
            if _alike(first, run(one, model)):
                return False
            try:
                copies = copy.deepcopy(model), copy.deepcopy(model)
            except Exception:  # as of a model that keeps its last output
                return True
            return _alike(*(run(one, each) for each in copies))
    finally:
        held.restore(device)


def remembering(model: nn.Module) -> str:
    """What to say of such a model."""
    return (
        f"{type(model).__name__} remembers: the same records give something else after others were "
        "seen, so earlier records, without noise, are in later gradients. Take what it keeps from "
        "pass to pass out, or hold it still while it is trained"
    )


@contextmanager
def _own_generators_set_back(model: nn.Module) -> Iterator[None]:
    """Generators that modules hold; those in other places stay unknown."""
    own = [v for m in model.modules() for v in vars(m).values() if isinstance(v, torch.Generator)]
    states = [generator.get_state() for generator in own]
    yield
    for generator, state in zip(own, states, strict=True):
        generator.set_state(state)


@contextmanager
def _held_still(model: nn.Module) -> Iterator[None]:
    """Spectral normalisation goes on by a step in each pass, whatever the records: held still."""
    held = [m for m in model.modules() if m.training and of_weights_alone(m)]
    for module in held:
        module.training = False
    try:
        yield
    finally:
        for module in held:
            module.training = True


def _alike(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """To roundings, tensor by tensor; what is next to nothing among the others need not agree."""
    sizes = {name: float(wanted.double().norm()) for name, wanted in a.items()}
    floor = 1e-6 * math.hypot(*(size for size in sizes.values() if math.isfinite(size)))
    for name, wanted in a.items():
        tolerance = 1e-9 if wanted.dtype is torch.float64 else 1e-3
        if wanted.dtype in (torch.float16, torch.bfloat16):
            tolerance = 5e-2
        if float((wanted - b[name]).double().norm()) > tolerance * sizes[name] + floor:
            return False
    return True
