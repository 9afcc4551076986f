"""The loss tailored to DP-SGD, and the penalty on pre-activations that it contains.  [Losing Less]

Squared error learns fast while steps are few, the focal loss later turns to hard records, and the
penalty keeps pre-activations small all along.

Engines call a loss as loss(outputs, targets). A loss that also needs the pre-activations says so
(`needs_pre_activations = True`), and whoever runs the model does it inside `watched(model, loss)`:
hooks that last as long as the context add up ‖h‖²/d layer by layer. The model does not change, and
no activation is kept: a layer leaves behind one number per record.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tacit.errors import UnsupportedModule
from tacit.losses.classification import Focal
from tacit.losses.record_loss import RecordLoss, needs_pre_activations, positive
from tacit.losses.registry import Task, register_loss
from tacit.losses.regression import SumSquaredError
from tacit.pytrees import tensors_of
from tacit.torch_internals import Convolution, outside_transforms


@dataclass(frozen=True)
class PreActivationPenalty(RecordLoss):
    """ℓ = Σ_{m<M} ‖h^m‖²/d_m, where layer m of M outputs h^m, which has d_m numbers.

    [Losing Less, Eq. 7]. Layers are the convolutions and linear layers of the model, in the order
    in which they are called; the last one called gives the logits and is left out. A layer that is
    called twice counts twice, a frozen one like any other; a model of one layer has no penalty.
    Layers inside an `nn.MultiheadAttention` or a recurrent cell are not called, and do not count.
    What a model runs under `torch.no_grad` counts without a gradient.

    It has no Lipschitz constant: nothing bounds h^m, and its gradient does not pass through the
    outputs. Per-sample clipping bounds it like any other gradient.
    """

    needs_pre_activations: ClassVar[bool] = True

    def per_record(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return mean_squares(outputs, self)


@register_loss("tailored", task=Task.CLASSIFICATION)
class TailoredLoss(RecordLoss):
    """α·focal_γ(h^M, y) + (1 − α)·½‖h^M − y‖² + ((1 − α)/β)·Σ_{m<M} ‖h^m‖²/d_m.

    α = 1/(1 + exp(e_t − e)) at epoch e, with the threshold epoch e_t  [Losing Less, Eq. 8].
    `beta=None` leaves the penalty out and `gamma=0` makes the focal loss cross-entropy.

    The epoch is a public function of the step. `Trainer` sets it before each step, on a fresh copy
    of the loss; in your own loop, call `loss.at(epoch)`. α is kept in a tensor that a recorded
    step reads each time.

    There is no Lipschitz constant. Per-sample and batch clipping take any loss.

        loss = TailoredLoss(threshold_epoch=5, beta=500, gamma=5)
    """

    def __init__(self, threshold_epoch: float, beta: float | None, gamma: float) -> None:
        if not math.isfinite(threshold_epoch):
            raise ValueError(f"threshold_epoch is {threshold_epoch}; give a finite number")
        if beta is not None:
            positive("beta", beta)
        self.threshold_epoch = threshold_epoch
        self.beta = beta
        self.gamma = gamma
        self._focal = Focal(gamma)
        self._alphas: dict[torch.device, Tensor] = {}
        self.at(0.0)

    def __repr__(self) -> str:
        return f"TailoredLoss({self.threshold_epoch}, beta={self.beta}, gamma={self.gamma})"

    @property
    def needs_pre_activations(self) -> bool:
        return self.beta is not None

    @property
    def epoch(self) -> float:
        return self._epoch

    @property
    def alpha(self) -> float:
        """The focal loss's weight at this epoch."""
        # Not exp(e_t − e), which overflows long before the epoch.
        return 0.5 * (1 + math.tanh(0.5 * (self._epoch - self.threshold_epoch)))

    def at(self, epoch: float) -> None:
        """Make this the loss of that epoch, 0 at the beginning."""
        if not 0 <= epoch < math.inf:
            raise ValueError(f"epoch is {epoch}; give 0 or a number above")
        self._epoch = float(epoch)
        for alpha in self._alphas.values():
            alpha.fill_(self.alpha)

    def fresh(self) -> TailoredLoss:
        """The same loss at epoch 0."""
        return TailoredLoss(self.threshold_epoch, self.beta, self.gamma)

    def per_record(self, outputs: Tensor, targets: Tensor) -> Tensor:
        alpha = self._alpha_on(outputs.device)
        easy = SumSquaredError().per_record(outputs, targets)
        if self.beta is not None:
            easy = easy + PreActivationPenalty().per_record(outputs, targets) / self.beta
        return alpha * self._focal.per_record(outputs, targets) + (1 - alpha) * easy

    def _alpha_on(self, device: torch.device) -> Tensor:
        """α where the outputs are: a number from elsewhere would be recorded for good."""
        if device not in self._alphas:
            # Made inside vmap, grad or inference mode it would belong to them, and it must outlive
            # them. In float64, which as a single number leaves the outputs' type as it is.
            with torch.inference_mode(False), outside_transforms():
                self._alphas[device] = torch.tensor(self.alpha, dtype=torch.float64, device=device)
        return self._alphas[device]


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Every convolution and linear layer of the model that is called as a module, by name.

    Attention uses the weights of its output layer without calling it.
    """
    uncalled = {
        part
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention)
        for part in module.modules()
    }
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Convolution) and module not in uncalled
    }


@contextmanager
def watched(model: nn.Module, loss: object) -> Iterator[None]:
    """Within this context, loss(model(x), y) sees the pre-activations that it needs.

    They are those of the last forward pass of a watched model in this thread. For a loss that needs
    none this does nothing. Compiled models run uncompiled meanwhile, since compiled code calls no
    hooks.

        with watched(model, loss):
            loss(model(x), y).backward()
    """
    if not needs_pre_activations(loss):
        yield
        return
    with ExitStack() as stack:
        stack.callback(setattr, _here, "latest", getattr(_here, "latest", None))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        # The fused kernels of transformers call no layers either.
        fused = torch.backends.mha.get_fastpath_enabled()
        stack.callback(torch.backends.mha.set_fastpath_enabled, fused)
        torch.backends.mha.set_fastpath_enabled(False)
        watch = _Watch(model)
        stack.callback(watch.forget)
        for handle in watch.hooks():
            stack.callback(handle.remove)
        _here.latest = None
        yield


def mean_squares(outputs: Tensor, loss: object) -> Tensor:
    """Σ_{m<M} ‖h^m‖²/d_m of each record, from the forward pass that gave these outputs: (B,)."""
    watch: _Watch | None = getattr(_here, "latest", None)
    if watch is None:
        raise ValueError(
            f"{type(loss).__name__} was called where no pre-activations were recorded; run the "
            "model and the loss inside `with tacit.losses.watched(model, loss):`. A loss of your "
            "own that contains this one sets needs_pre_activations = True. A query that takes the "
            "loss's gradient in the outputs alone, such as Clipless, cannot train with it"
        )
    return watch.total(outputs, loss)


# The last forward pass that was watched in this thread.
_here = threading.local()


class _Watch:
    """Notes ‖h‖²/d of one layer after the other, in the thread that it was made in.

    Layers that run again in a backward pass (checkpoints, engines) do not count again.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.layers = list(layers_of(model).values())
        self.thread = threading.get_ident()
        self.forget()

    def forget(self) -> None:
        self.running = False
        self.rows = 0
        self.mean_squares: list[Tensor] = []

    def hooks(self) -> Iterator[Any]:
        def in_this_thread(hook: Callable[..., None]) -> Callable[..., None]:
            return lambda *args: hook(*args) if threading.get_ident() == self.thread else None

        for layer in self.layers:
            yield layer.register_forward_hook(in_this_thread(self._called))
        # A model may be a layer itself: what ends its pass is registered after what it counts by.
        begins, ends = in_this_thread(self._begins), in_this_thread(self._ends)
        yield self.model.register_forward_pre_hook(begins, with_kwargs=True)
        yield self.model.register_forward_hook(ends)

    def total(self, outputs: Tensor, loss: object) -> Tensor:
        """The sum over all layers but the last one that was called."""
        if self.layers and not self.mean_squares:
            raise UnsupportedModule(
                f"{type(self.model).__name__} has {len(self.layers)} convolutions and linear "
                f"layers and called none of them, so {type(loss).__name__} has no pre-activations; "
                "call layers as modules, in the thread that trains"
            )
        if len(outputs) != self.rows:
            raise ValueError(
                f"{type(loss).__name__} was given {len(outputs)} records after a forward pass of "
                f"{self.rows}; give it the outputs of that pass. To combine losses add them "
                "(a * loss + b * other): an engine cuts a loss it does not know into single records"
            )
        if len(self.mean_squares) < 2:
            return torch.zeros(len(outputs), dtype=outputs.dtype, device=outputs.device)
        total = self.mean_squares[0]
        for mean_squares_B in self.mean_squares[1:-1]:
            total = total + mean_squares_B.to(total.device)
        return total.to(outputs.device)

    def _begins(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.forget()
        self.rows = next((len(t) for t in tensors_of((args, kwargs)) if t.dim()), 0)
        self.running = True

    def _ends(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.running = False
        _here.latest = self

    def _called(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not isinstance(output, Tensor):
            return
        # A checkpoint that runs again must save what it saved before: so this comes first.
        mean_square_B = self._mean_square(layer, output)
        if self.running:
            self.mean_squares.append(mean_square_B)

    def _mean_square(self, layer: nn.Module, h: Tensor) -> Tensor:
        """‖h‖²/d of each record. In a batch of one, everything belongs to that record."""
        if not self.running or self.rows == 1:
            rows = 1 if self.rows == 1 or h.dim() == 0 else len(h)
        elif h.dim() and len(h) == self.rows:
            rows = self.rows
        else:
            raise UnsupportedModule(
                f"{type(layer).__name__} gave a tensor of shape {tuple(h.shape)} where there are "
                f"{self.rows} records, so whose pre-activations these are is unknown; keep the "
                "records first, or name engine=PerRecord(), which runs each record alone"
            )
        half = h.dtype in (torch.float16, torch.bfloat16)
        # A copy, since what comes next may write into h.
        return (h.float() if half else h.clone()).reshape(rows, -1).square().mean(dim=1)
