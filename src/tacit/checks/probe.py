"""Real records to ask a model with, and the conditions under which two answers can be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tacit.batch import Batch
from tacit.checks.program_state import ProgramState
from tacit.checks.side_effects import of_weights_alone
from tacit.tensor_float import all_digits

MOST_RECORDS = 256
_WANTED = 32  # records, from the rest of the dataset where the batch has fewer
# Relative differences that roundings explain: of one shape, and of two shapes.
SAME_SHAPE = {torch.float64: 1e-11, torch.float32: 1e-5}
OTHER_SHAPE = {torch.float64: 1e-7, torch.float32: 1e-3}
_HALF = 5e-2
_DROPOUTS = (
    "dropout",
    "alpha_dropout",
    "feature_alpha_dropout",
    "feature_dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
)


# From inputs to what the model is given: one view of each record.
Seen = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Probe:
    """Records of the dataset, and everything that has to be put back between two questions."""

    model: nn.Module
    parameters: dict[str, nn.Parameter]
    inputs: Tensor
    targets: Tensor
    state: ProgramState

    def __len__(self) -> int:
        return len(self.inputs)


@contextmanager
def probing(
    model: nn.Module,
    loss: object,
    parameters: dict[str, nn.Parameter],
    batch: Batch,
    seen: Seen,
    most: int,
    finite: bool = True,
) -> Iterator[Probe | None]:
    """A probe of the batch's records; afterwards the model and all generators are as before.

    None where there is no record to ask with: see `probe_records`.
    """
    device = batch.indices.device
    with _still(model), all_digits(), torch.compiler.set_stance("force_eager"):
        state = ProgramState(model, loss, device=device)
        try:
            inputs, targets = probe_records(batch, most, finite)
            found = len(inputs) > 0
            yield Probe(model, parameters, seen(inputs), targets, state) if found else None
        finally:
            state.restore()


def probe_records(
    batch: Batch, most: int = MOST_RECORDS, finite: bool = True
) -> tuple[Tensor, Tensor]:
    """The batch's own records, and others of its dataset where it has few.

    Finite ones alone; or, with `finite=False`, all of them if any is not finite, and else none.
    At least two rows: of a dataset of one record that record twice, which cannot show what a
    different record would change.
    """
    own = batch.indices if batch.mask is None else batch.indices[batch.mask]
    rows = own[:most]
    wanted = min(_WANTED, most)
    if len(rows) < wanted:
        others = torch.ones(len(batch.records), dtype=torch.bool, device=rows.device)
        others[rows] = False
        rows = torch.cat([rows, others.nonzero().flatten()[: wanted - len(rows)]])
    inputs, targets = batch.records.inputs[rows], batch.records.targets[rows]
    usable = _finite_rows(inputs) & _finite_rows(targets)
    if not finite:
        usable = torch.full_like(usable, not bool(usable.all()))
    inputs, targets = inputs[usable], targets[usable]
    if len(inputs) == 1:
        inputs, targets = inputs.repeat_interleave(2, 0), targets.repeat_interleave(2, 0)
    return inputs, targets


def any_missing(batch: Batch, most: int) -> bool:
    """Whether a record of the probe is not finite."""
    return len(probe_records(batch, most, finite=False)[0]) > 0


def agree(a: Sequence[Tensor], b: Sequence[Tensor], tolerances: dict[torch.dtype, float]) -> bool:
    """To roundings, row by row; what is next to nothing beside the others need not agree."""
    if [t.shape for t in a] != [t.shape for t in b]:
        return False
    if all(map(torch.equal, a, b)):
        return True
    sizes = [_row_norms(t) for t in a]
    for v, w, size_B in zip(a, b, sizes, strict=True):
        v_BP, w_BP = (t.double().reshape(len(t), -1) for t in (v, w))
        if not torch.equal(v_BP.isfinite(), w_BP.isfinite()):
            return False
        beside = torch.stack([s for s in sizes if len(s) == len(size_B)])
        floor_B = 1e-6 * beside.square().sum(dim=0).sqrt()
        error_B = _row_norms(torch.where(v_BP.isfinite(), v_BP - w_BP, 0.0))
        if bool((error_B > tolerances.get(v.dtype, _HALF) * size_B + floor_B).any()):
            return False
    return True


def _row_norms(rows: Tensor) -> Tensor:
    """‖row‖ over its finite entries."""
    flat = rows.double().reshape(len(rows), -1)
    return torch.where(flat.isfinite(), flat, 0.0).norm(dim=1)


def _finite_rows(rows: Tensor) -> Tensor:
    return rows.isfinite().unsqueeze(-1).flatten(1).all(dim=1)


class IndexCasts(TorchFunctionMode):
    """Notes whether floating-point values are turned into integers, as indices are."""

    found = False
    _names = frozenset({"long", "int", "short", "char", "byte", "to", "type", "type_as"})

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in self._names and isinstance(made, Tensor):
            came = isinstance(args[0], Tensor) and args[0].is_floating_point()
            integer = not made.is_floating_point() and made.dtype is not torch.bool
            self.found = self.found or (came and integer)
        return made


class NoDropout(TorchFunctionMode):
    """Dropout of every kind, called as a module or as a function, is the identity."""

    _functions = frozenset(
        getattr(place, name) for place in (F, torch) for name in _DROPOUTS if hasattr(place, name)
    )

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self._functions:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            # Fifth of its arguments.
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs = {**kwargs, "dropout_p": 0.0}
        return func(*args, **kwargs)


@contextmanager
def _still(model: nn.Module) -> Iterator[None]:
    """Holds back what changes with each pass by design, in PyTorch's own modules.

    Spectral normalisation takes a step in each training pass, whatever the records. Recurrent
    layers draw dropout from a state of cuDNN's own, and engines run them and attention by a program
    of their own, which draws in another order: without dropout. cuDNN has no backward pass in
    evaluation mode, which without dropout equals training.
    """
    with ExitStack() as stack:

        def put(module: Any, name: str, value: object) -> None:
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)

        for module in model.modules():
            if module.training and of_weights_alone(module):
                put(module, "training", False)
            if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
                put(module, "dropout", 0.0)
            if type(module) in (nn.RNN, nn.GRU, nn.LSTM):
                put(module, "training", True)
        yield
