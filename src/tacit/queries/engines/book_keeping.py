"""The book-keeping engine: exact per-sample clipping in one forward and one backward pass."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch
from torch import Tensor, nn

from tacit.batch import Batch
from tacit.errors import UnsupportedModule
from tacit.queries.clipping import clip_scale
from tacit.queries.engines.fallback import func_gradients, say_once
from tacit.queries.engines.precision import no_autocast, wide
from tacit.queries.engines.record_losses import losses_of
from tacit.queries.engines.rows import RecordGradients, Stacked
from tacit.queries.engines.rules import record_gradients
from tacit.queries.engines.self_check import check_once
from tacit.queries.engines.tape import Call, Tape
from tacit.queries.engines.task import Task


class BookKeeping:
    """Keeps each layer's input a and output gradient b; norms and clipped sums come from those.

    [Bu 2023, book-keeping]. A layer's rule makes rows or norms, whichever is cheaper for its
    shapes, as soon as b arrives; when all have arrived the records' norms are known, and the
    clipped sum is one contraction a layer. Modules without a rule go through `torch.func` alone.
    """

    def clipped_sums(self, task: Task, piece: Batch) -> dict[str, Tensor]:
        if len(piece) == 0:
            return {}

        def clipped(pair: Batch, max_norm: float) -> dict[str, Tensor]:
            together = replace(task, blocks=(tuple(task.parameters),), norms=(max_norm,))
            return self._clipped(together, pair)

        check_once(task.model, task.loss, task.parameters, piece, clipped)
        return self._clipped(task, piece)

    def _clipped(self, task: Task, piece: Batch) -> dict[str, Tensor]:
        if len(piece) == 0:
            return {}
        sums, keep = self.sums_and_keep(task, piece)
        # Asked last, so that a GPU has all of its work before somebody waits for the answer.
        if not bool(keep.all()):
            # Rare: run again without the records that are not finite, since 0 · NaN is NaN.
            return self._clipped(task, piece.only(keep))
        return sums

    def sums_and_keep(self, task: Task, piece: Batch) -> tuple[dict[str, Tensor], Tensor]:
        """The clipped sums, and which records are finite: the sums are right if all are."""
        gradients = self._gradients(task, piece)
        with no_autocast(piece.indices.device):
            return self._scaled(gradients, task, piece)

    @staticmethod
    def _scaled(
        gradients: dict[str, RecordGradients], task: Task, piece: Batch
    ) -> tuple[dict[str, Tensor], Tensor]:
        if not gradients:
            return {}, torch.ones_like(piece.indices, dtype=torch.bool)
        squares = {name: wide(g.squares()) for name, g in gradients.items()}
        keep = torch.stack(list(squares.values())).sum(dim=0).isfinite()
        sums = {}
        for names, max_norm in zip(task.blocks, task.norms, strict=True):
            used = [n for n in names if n in squares]
            if not used:
                continue
            norms_B = torch.stack([squares[n] for n in used]).sum(dim=0).sqrt()
            scale = clip_scale(norms_B, max_norm, [norms_B.dtype])
            if piece.mask is not None:
                scale = scale * piece.mask
            for name in used:
                sums[name] = gradients[name].total(scale)
        return sums, keep

    def _gradients(self, task: Task, piece: Batch) -> dict[str, RecordGradients]:
        model, parameters = task.model, task.parameters
        names = {id(p): n for n, p in parameters.items()}
        owners = watched_modules(model, set(names))
        arrivals: dict[str, list[RecordGradients]] = {n: [] for n in parameters}

        def on_arrival(call: Call) -> None:
            local = owners[call.module]
            with no_autocast(piece.indices.device):
                found = record_gradients(call, set(local), len(piece))
                if found is None:
                    say_once(call.module)
                    found = func_gradients(call, set(local), len(piece))
            for key, value in found.items():
                name = names[id(local[key])]
                shared = uses[name] > 1
                arrivals[name].append(Stacked(value.rows()) if shared else value)

        tape = Tape(model, list(owners), len(piece), on_arrival)
        with tape.recording():
            outputs = model(piece.inputs)
            total = losses_of(task.loss, outputs, piece.targets).sum()
            uses = Counter(
                names[id(p)]
                for module, count in tape.calls.items()
                for p in owners[module].values()
                for _ in range(count)
            )
            tape.backward(total)
        return {name: _together(found) for name, found in arrivals.items() if found}


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
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise UnsupportedModule(
                f"{type(module).__name__} with max_norm rewrites the rows that records read, in "
                "the forward pass and without noise; build it without max_norm"
            )
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
