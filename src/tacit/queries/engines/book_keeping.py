"""The book-keeping engine: exact per-sample clipping in one forward and one backward pass."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

from tacit.batch import Batch
from tacit.queries.engines.precision import no_autocast, wide
from tacit.queries.engines.record_losses import losses_of
from tacit.queries.engines.rows import RecordGradients, Stacked
from tacit.queries.engines.scales import scales_and_counts
from tacit.queries.engines.tape import Call, Tape
from tacit.queries.engines.task import Clipped, Task
from tacit.queries.engines.views import gradients_of_records, mask_of_records


class BookKeeping:
    """Keeps each layer's input a and output gradient b; norms and clipped sums come from those.

    [Bu 2023, book-keeping]. A layer's rule makes rows or norms, whichever is cheaper for its
    shapes, as soon as b arrives; when all have arrived the records' norms are known, and the
    clipped sum is one contraction a layer. Modules without a rule go through `torch.func` alone.
    Views of a record are further positions of it (see `views`).
    """

    def clipped_sums(self, task: Task, piece: Batch) -> Clipped:
        if len(piece) == 0:
            return Clipped()
        return self.sums_and_keep(task, piece)[0]

    def sums_and_keep(self, task: Task, piece: Batch) -> tuple[Clipped, Tensor]:
        """The clipped sums, and which records are finite: the others have a scale of zero, and
        so add nothing, whatever they hold (see `scaling`)."""
        gradients = self._gradients(task, piece)
        with no_autocast(piece.indices.device):
            return self._scaled(gradients, task, piece)

    @staticmethod
    def _scaled(
        gradients: dict[str, RecordGradients], task: Task, piece: Batch
    ) -> tuple[Clipped, Tensor]:
        """Scales come from upper bounds of the norms; counts take them for the norms."""
        squares = {name: wide(g.squares()) for name, g in gradients.items()}
        nobody = torch.zeros_like(piece.indices[:: task.views], dtype=torch.float32)
        keep = torch.stack([nobody, *squares.values()]).sum(dim=0).isfinite()
        mask = mask_of_records(piece, task.views)
        counted = keep if mask is None else keep & mask
        norms = _norms_of_blocks(task, squares, nobody)
        scales, counts = scales_and_counts(norms, task, counted, [n.dtype for n in norms])
        sums = {}
        for names, scale_B in zip(task.blocks, scales, strict=True):
            scale = torch.where(counted, scale_B, 0.0)
            for name in names:
                if name in squares:
                    sums[name] = gradients[name].total(scale)
        return Clipped(sums, counts), keep

    def block_norms(self, task: Task, piece: Batch) -> list[Tensor]:
        gradients = self._gradients(task, piece)
        with no_autocast(piece.indices.device):
            squares = {name: wide(g.squares()) for name, g in gradients.items()}
            nobody = torch.zeros_like(piece.indices[:: task.views], dtype=torch.float32)
            return _norms_of_blocks(task, squares, nobody)

    def _gradients(self, task: Task, piece: Batch) -> dict[str, RecordGradients]:
        model, parameters, rows = task.model, task.parameters, len(piece)
        names = {id(p): n for n, p in parameters.items()}
        owners = watched_modules(model, set(names))
        arrivals: dict[str, list[RecordGradients]] = {n: [] for n in parameters}

        def on_arrival(call: Call) -> None:
            local = owners[call.module]
            with no_autocast(piece.indices.device):
                found = gradients_of_records(call, set(local), rows, task.views)
                for key, value in found.items():
                    name, mask = names[id(local[key])], task.active.get(names[id(local[key])])
                    if uses[name] > 1 or mask is not None:
                        rows_BP = wide(value.rows())
                        kept = rows_BP if mask is None else torch.where(mask, rows_BP, 0.0)
                        value = Stacked(kept)
                    arrivals[name].append(value)

        tape = Tape(model, list(owners), rows, on_arrival)
        with tape.recording():
            outputs = model(piece.inputs)
            total = losses_of(task.loss, outputs, piece.targets).sum()
            total = total if task.views == 1 else total / task.views
            uses = Counter(
                names[id(p)]
                for module, count in tape.calls.items()
                for p in owners[module].values()
                for _ in range(count)
            )
            tape.backward(total)
        return {name: _together(found) for name, found in arrivals.items() if found}


def _norms_of_blocks(task: Task, squares: dict[str, Tensor], nobody: Tensor) -> list[Tensor]:
    norms = []
    for names in task.blocks:
        used = [squares[n] for n in names if n in squares]
        norms.append(torch.stack(used).sum(dim=0).sqrt() if used else None)
    like = next((norm for norm in norms if norm is not None), nobody)
    return [torch.zeros_like(like) if norm is None else norm for norm in norms]


def watched_modules(model: nn.Module, wanted: set[int]) -> dict[nn.Module, dict[str, nn.Parameter]]:
    """The modules that own trainable parameters, and which, by their name in the module.

    Attention uses the weights of its output layer without calling it, so they are its own.
    """
    owners: dict[nn.Module, dict[str, nn.Parameter]] = {}
    inside = {
        child
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention)
        for child in module.modules()
        if child is not module
    }
    for module in model.modules():
        if module in inside:
            continue
        whole = isinstance(module, nn.MultiheadAttention)
        listed = module.named_parameters(recurse=whole, remove_duplicate=False)
        own = {n: p for n, p in listed if id(p) in wanted}
        if own:
            owners[module] = own
    return owners


def _together(found: list[RecordGradients]) -> RecordGradients:
    """One use's gradients as they are; of several uses, the sum of their rows."""
    if len(found) == 1:
        return found[0]
    total = found[0].rows()
    for other in found[1:]:
        total = total + other.rows()
    return Stacked(total)
