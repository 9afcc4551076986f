"""Whether a run needs to be told where BatchNorm's statistics come from."""

from __future__ import annotations

from torch import nn

from tacit.data.records import Records
from tacit.errors import MissingStatistics
from tacit.queries.bounded_gradient import GradientQuery
from tacit.queries.mini_sets.batch_clip import BatchClip
from tacit.queries.public_set import require_public
from tacit.statistics.public import PublicStatistics
from tacit.statistics.released import ReleasedStatistics
from tacit.statistics.tracking import unfrozen_norms

Statistics = PublicStatistics | ReleasedStatistics


def check_statistics(
    model: nn.Module, statistics: Statistics | None, private: Records, query: GradientQuery
) -> None:
    """Raise unless evaluation will have statistics to normalise by, and they may be known.

    Training keeps none, so at the end a BatchNorm that trained would normalise by its initial
    mean 0 and variance 1, which have nothing to do with its inputs. Queries other than BatchClip
    take no such model, and say so themselves.
    """
    norms = unfrozen_norms(model)
    if statistics is None and norms and isinstance(query, BatchClip):
        name, norm = next(iter(norms.items()))
        raise MissingStatistics(
            f"module {name!r} ({type(norm).__name__}) normalises by running statistics in "
            "evaluation, and private training keeps none. Give the Trainer "
            "statistics=PublicStatistics(public, set_size) to have them from public records, or "
            "statistics=ReleasedStatistics(records, noise_multiplier) to have them with noise that "
            "is charged, or convert the network: make_trainable(model)"
        )
    if statistics is not None and not norms:
        raise ValueError(
            f"{type(statistics).__name__} was given, and the model has no BatchNorm with running "
            "statistics in training mode; leave statistics out"
        )
    if isinstance(statistics, PublicStatistics):
        require_public(statistics.public, private)
    elif isinstance(statistics, ReleasedStatistics):
        statistics.check(model)
