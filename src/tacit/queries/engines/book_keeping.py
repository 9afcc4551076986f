"""The book-keeping engine: exact per-sample clipping in one forward and one backward pass."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from tacit.batch import Batch
from tacit.errors import UnsupportedModule
from tacit.queries.blocks import Blocks
from tacit.queries.bounded_gradient import Loss
from tacit.queries.clipping import clip_scale, wide_dtype
from tacit.queries.engines.fallback import func_gradients
from tacit.queries.engines.rows import RecordGradients, Stacked
from tacit.queries.engines.rules import rule_for
from tacit.queries.engines.self_check import check_once
from tacit.queries.engines.tape import Tape


class BookKeeping:
    """Keeps each layer's input a and output gradient b; norms and clipped sums come from those.

    [Bu 2023, book-keeping]. A layer's rule makes rows or norms, whichever is cheaper for its
    shapes, as soon as b arrives; when all have arrived the records' norms are known, and the
    clipped sum is one contraction a layer. Modules without a rule go through `torch.func` alone.
    """

    def clipped_sums(
        self,
        model: nn.Module,
        loss: Loss,
        parameters: dict[str, nn.Parameter],
        blocks: Blocks,
        norms: Sequence[float],
        piece: Batch,
    ) -> dict[str, Tensor]:
        if len(piece) == 0:
            return {}
        everything = (tuple(parameters),)

        def clipped(pair: Batch, max_norm: float) -> dict[str, Tensor]:
            return self._clipped(model, loss, parameters, everything, (max_norm,), pair)

        check_once(model, loss, parameters, piece, clipped)
        return self._clipped(model, loss, parameters, blocks, norms, piece)

    def _clipped(
        self,
        model: nn.Module,
        loss: Loss,
        parameters: dict[str, nn.Parameter],
        blocks: Blocks,
        norms: Sequence[float],
        piece: Batch,
    ) -> dict[str, Tensor]:
        if len(piece) == 0:
            return {}
        gradients = self._gradients(model, loss, parameters, piece)
        if not gradients:
            return {}
        squares = {name: _wide(g.squares()) for name, g in gradients.items()}
        if any(len(s) != len(piece) for s in squares.values()):
            raise UnsupportedModule(
                "a layer saw another number of rows than there are records; put the batch first, "
                "or name engine=PerRecord()"
            )
        keep = torch.stack(list(squares.values())).sum(dim=0).isfinite()
        sums = {}
        for names, max_norm in zip(blocks, norms, strict=True):
            used = [n for n in names if n in squares]
            if not used:
                continue
            norms_B = torch.stack([squares[n] for n in used]).sum(dim=0).sqrt()
            scale = clip_scale(norms_B, max_norm, [norms_B.dtype])
            if piece.mask is not None:
                scale = scale * piece.mask
            for name in used:
                sums[name] = gradients[name].total(scale)
        # Asked last, so that a GPU has all of its work before somebody waits for the answer.
        if not bool(keep.all()):
            # Rare: run again without the records that are not finite, since 0 · NaN is NaN.
            return self._clipped(model, loss, parameters, blocks, norms, piece.only(keep))
        return sums

    def _gradients(
        self, model: nn.Module, loss: Loss, parameters: dict[str, nn.Parameter], piece: Batch
    ) -> dict[str, RecordGradients]:
        names = {id(p): n for n, p in parameters.items()}
        owners = watched_modules(model, set(names))
        arrivals: dict[str, list[RecordGradients]] = {n: [] for n in parameters}

        def on_arrival(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], grad: Tensor
        ) -> None:
            local = owners[module]
            rule = rule_for(module)
            if rule is not None and len(args) == 1 and not kwargs:
                found = rule(module, set(local), _wide(args[0]), _wide(grad))
            else:
                _say_once(module)
                found = func_gradients(module, set(local), args, kwargs, grad)
            for key, value in found.items():
                name = names[id(local[key])]
                shared = uses[name] > 1
                arrivals[name].append(Stacked(value.rows()) if shared else value)

        tape = Tape(model, list(owners), on_arrival)
        with tape.recording():
            outputs = model(piece.inputs)
            total = losses_of(loss, outputs, piece.targets).sum()
            uses = Counter(
                names[id(p)]
                for module, count in tape.calls.items()
                for p in owners[module].values()
                for _ in range(count)
            )
            tape.backward(total)
        return {name: _together(found) for name, found in arrivals.items() if found}


def losses_of(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of each record on its own, whatever its reduction over records."""

    def of_one(output: Tensor, target: Tensor) -> Tensor:
        return loss(output.unsqueeze(0), target.unsqueeze(0)).sum()

    return vmap(of_one, randomness="different")(outputs, targets)


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
        own = {n: p for n, p in module.named_parameters(recurse=whole) if id(p) in wanted}
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


_told: set[type[nn.Module]] = set()


def _say_once(module: nn.Module) -> None:
    if type(module) not in _told:
        _told.add(type(module))
        warnings.warn(
            f"{type(module).__name__} has no rule for per-record gradients; torch.func runs it "
            "a second time, which is exact and slower",
            stacklevel=2,
        )


def _wide(tensor: Tensor) -> Tensor:
    """Norms and sums are taken in at least float32; tokens stay what they are."""
    return tensor.to(wide_dtype(tensor.dtype)) if tensor.is_floating_point() else tensor
