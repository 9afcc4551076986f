"""Frozen parameters that a checkpoint leaves out, such as those of a model under an adapter.

Their values are those that the model was given with, so a run can be resumed with a model that has
them. A digest of each one tells whether it has. A parameter that was trained, or written to, since
the run began is not left out; a write through `.data` is not noticed, as PyTorch does not count it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tacit.torch_internals import version_of


class FrozenWeights:
    """The parameters that are frozen when a run begins, with their digests.

    Call it, and `unchanged`, where the model has all of its weights.
    """

    def __init__(self, model: nn.Module) -> None:
        frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        self._versions = {name: version_of(p) for name, p in frozen.items()}
        self._digests = {name: digest_of_tensor(p) for name, p in frozen.items()}

    def unchanged(self, model: nn.Module) -> dict[str, str]:
        """The digests of those that are frozen still, and were not written to since."""
        return {
            name: self._digests[name]
            for name, p in model.named_parameters()
            if not p.requires_grad and self._versions.get(name) == version_of(p)
        }


def other_than(digests: Mapping[str, str], model: nn.Module) -> str | None:
    """The first parameter whose values are not those of its digest; None if all are."""
    own = dict(model.named_parameters())
    for name, digest in digests.items():
        if name not in own or digest_of_tensor(own[name]) != digest:
            return name
    return None


def digest_of_tensor(tensor: Tensor) -> str:
    """SHA-256 of type, shape and values."""
    values = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{values.dtype} {tuple(values.shape)}".encode())
    digest.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
