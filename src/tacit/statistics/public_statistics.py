"""BatchNorm's running statistics from public records: free of charge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tacit.pytrees import call_model
from tacit.records import Records, as_records
from tacit.statistics.tracking import (
    evaluating,
    set_origin,
    unfrozen_norms,
    without_running_statistics,
)
from tacit.torch_internals import InstanceNorm


class PublicStatistics:
    """Running statistics that are recomputed on public records: free, and exact.

    With mini-sets S_1, …, S_k of `set_size` public records, in their order, each norm gets

        running_mean = (1/k) Σ_j mean(x; S_j),   running_var = (1/k) Σ_j var(x; S_j),

    x its inputs, var the unbiased variance: PyTorch's cumulative average (momentum=None)
    [Ioffe 2015, Alg. 2]. All norms normalise by the mini-set's own statistics meanwhile, as in
    training, so take the mini-sets as large as in training. All other modules are in evaluation
    mode: the statistics are for a network without dropout, which is the one that is evaluated.
    For InstanceNorm mean and var are of each record alone, averaged over the records. Norms that
    are frozen stay as they are. Records that do not fill a mini-set are left out.

    No private record is read, so there is nothing to charge. That `public` is public is the
    user's word; the Trainer refuses the training records themselves.
    """

    def __init__(self, public: object, set_size: int) -> None:
        self.public: Records = as_records(public)
        if set_size < 1:
            raise ValueError(f"sets of {set_size} records; give set_size at least 1")
        if len(self.public) < set_size:
            raise ValueError(
                f"{len(self.public)} public records do not fill one mini-set of {set_size}; "
                "give more records, or a smaller set_size"
            )
        self.set_size = set_size

    def __repr__(self) -> str:
        return f"PublicStatistics({self.public!r}, set_size={self.set_size})"

    @property
    def note(self) -> str:
        return f"BatchNorm's statistics are those of the public records {self.public.name!r}"

    @torch.no_grad()
    def apply(self, model: nn.Module) -> None:
        """Set the running statistics of all norms that are not frozen; weights stay as they are."""
        norms = list(unfrozen_norms(model).values())
        averages = [_Average() for _ in norms]
        hooks = [
            norm.register_forward_pre_hook(_watch(average), with_kwargs=True)
            for norm, average in zip(norms, averages, strict=True)
        ]
        try:
            with evaluating(model), without_running_statistics(model):
                for norm in norms:
                    norm.train()
                self._pass(model)
        finally:
            for hook in hooks:
                hook.remove()
        for norm, average in zip(norms, averages, strict=True):
            if average.count:  # a norm that the forward pass does not use has no inputs
                self._require_finite(norm, average)
                mean_C, variance_C = average.sums / average.count
                set_statistics(norm, mean_C, variance_C, average.count)
                set_origin(norm, f"from the public records {self.public.name!r}")

    def _require_finite(self, norm: nn.Module, average: _Average) -> None:
        if not average.sums.isfinite().all():
            raise ValueError(
                f"the inputs of a {type(norm).__name__} are not finite on the public records "
                f"{self.public.name!r}; the network has diverged, or a record holds NaN: leave "
                "such records out"
            )

    def _pass(self, model: nn.Module) -> None:
        device = next(iter(model.parameters())).device
        for start in range(0, len(self.public) - self.set_size + 1, self.set_size):
            one = self.public.take(slice(start, start + self.set_size)).to(device)
            call_model(model, one.inputs)


@dataclass
class _Average:
    """The mean over calls of a mean and a variance per channel."""

    count: int = 0
    sums: Tensor = field(default_factory=lambda: torch.zeros(()))

    def add(self, mean_C: Tensor, variance_C: Tensor) -> None:
        self.sums = self.sums.to(mean_C) + torch.stack((mean_C, variance_C))
        self.count += 1


def _watch(average: _Average) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = input_of(args, kwargs).double()
        if isinstance(module, InstanceNorm):
            x = x if x.dim() > module._get_no_batch_dim() else x[None]
            each_BCP = x.flatten(2)
            average.add(each_BCP.mean(2).mean(0), each_BCP.var(2).mean(0))
        else:
            x_CR = x.transpose(0, 1).flatten(1)
            average.add(x_CR.mean(1), x_CR.var(1))

    return hook


def input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What a norm was called with, by position or by name."""
    x = args[0] if args else kwargs["input"]
    assert isinstance(x, Tensor)
    return x


@torch.no_grad()
def set_statistics(norm: nn.Module, mean_C: Tensor, variance_C: Tensor, count: int) -> None:
    """Write the buffers of a norm, in place."""
    norm.get_buffer("running_mean").copy_(mean_C)
    norm.get_buffer("running_var").copy_(variance_C)
    if getattr(norm, "num_batches_tracked", None) is not None:
        norm.get_buffer("num_batches_tracked").fill_(count)
