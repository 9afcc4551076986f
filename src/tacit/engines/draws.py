"""What a pass begins from besides weights and records, to run it again: generators and buffers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tacit.pytrees import Tree, device_of


class Draws:
    """The generators' states now; `restore` makes them draw the same numbers again."""

    def __init__(self, inputs: Tree) -> None:
        device = device_of(inputs)
        self._torch = torch.get_rng_state()
        self._device = device
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._python = random.getstate()
        self._numpy = np.random.get_state(legacy=False)

    def moved(self) -> bool:
        """Whether PyTorch's generators have drawn since."""
        if self._cuda is not None and not torch.equal(
            self._cuda, torch.cuda.get_rng_state(self._device)
        ):
            return True
        return not torch.equal(self._torch, torch.get_rng_state())

    def restore(self) -> None:
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)
        random.setstate(self._python)
        np.random.set_state(self._numpy)


class Buffers:
    """A model's buffers now; `restore` takes back what passes have written since.

    Spectral normalisation moves its buffers in every pass, from its weights alone. A pass that is
    run twice must begin both times from the same ones. With `names`, only those are kept.
    """

    def __init__(self, model: nn.Module, names: frozenset[str] | None = None) -> None:
        self._held: dict[str, tuple[Tensor, Tensor]] = {
            name: (buffer.detach(), buffer.detach().clone())
            for name, buffer in (model.named_buffers() if names is None or names else ())
            if names is None or name in names
        }

    def changed(self) -> frozenset[str]:
        """The names of the buffers that were written since. Reads their values."""
        return frozenset(
            name for name, (buffer, before) in self._held.items() if not _equal(buffer, before)
        )

    def restore(self, names: frozenset[str] | None = None) -> None:
        """Take back what was written to these buffers, by default to all that have changed."""
        for name in self.changed() if names is None else names:
            buffer, before = self._held[name]
            buffer.copy_(before)


class Start:
    """Where a pass begins: the generators' states and the model's buffers, of all or some names."""

    def __init__(self, inputs: Tree, model: nn.Module, names: frozenset[str] | None = None) -> None:
        self._draws, self._buffers = Draws(inputs), Buffers(model, names)

    def moved(self) -> bool:
        """Whether PyTorch's generators have drawn since."""
        return self._draws.moved()

    def restore(self) -> None:
        self._draws.restore()
        self._buffers.restore()


def _equal(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | ((a != a) & (b != b))).all())  # NaN equals NaN


_DROPOUTS = (
    "dropout",
    "alpha_dropout",
    "feature_alpha_dropout",
    "feature_dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
)


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
