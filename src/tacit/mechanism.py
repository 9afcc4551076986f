"""The Gaussian mechanism over blocks: from a bounded gradient to a private one."""

from __future__ import annotations

import itertools

import dp_accounting as dpa
from torch import nn

from tacit.accounting.plan import Plan
from tacit.batch import Batch
from tacit.budget import Relation
from tacit.errors import PlanChanged
from tacit.noise import (
    Allocation,
    GlobalNoise,
    joint_noise_multiplier,
    noise_left,
)
from tacit.private_gradient import PrivateGradient
from tacit.queries.bounded_gradient import (
    Adapting,
    Expecting,
    GradientQuery,
    Loss,
    sizes_of,
)
from tacit.randomness import Randomness, step_draws
from tacit.sampling.sampler import Sampler


class Mechanism:
    """Adds N(0, s_h²) to block h so that the joint noise multiplier is z, whatever the route.

    The sampler says what is accounted, and batches must come from the same scheme. Statistics
    that a query asks for have noise of their own, fixed beforehand; the blocks get what is left:

        1/z² = Σ_h (Δ_h/s_h)² + Σ_b (Δ_b/s_b)².

    Noise, masks and views come from one secret stream (`tacit.randomness`), whatever
    `torch.manual_seed` was given. With a `seed` all of them can be repeated, also by whoever else
    knows the seed; on one ledger no two steps ever draw the same noise from it.

    One mechanism is one run: a query that adapts is taken at its beginning (`query.fresh()`), and
    the one that was given stays as it is.
    """

    def __init__(
        self,
        query: GradientQuery,
        sampler: Sampler,
        noise_multiplier: float,
        *,
        relation: Relation = Relation.ADD_OR_REMOVE_ONE,
        allocation: Allocation | None = None,
        prelude: tuple[dpa.DpEvent, ...] = (),
        seed: int | None = None,
    ) -> None:
        self.query: GradientQuery = query.fresh() if isinstance(query, Adapting) else query
        self.allocation = allocation or GlobalNoise()
        self.plan = Plan(
            scheme=sampler.scheme,
            noise_multiplier=noise_multiplier,
            relation=relation,
            steps=sampler.steps,
            unit=query.unit,
            prelude=prelude,
        )
        if isinstance(self.query, Expecting):
            self.query.expect(sampler.steps)
        self._randomness = Randomness(seed)
        self._steps = itertools.count()
        # Of each parameter's released gradient, the noise's standard deviation. Public.
        self.noise_of: dict[str, float] = {}

    def privatise(self, model: nn.Module, loss: Loss, batch: Batch) -> PrivateGradient:
        """The private gradient of one step: bounded, costed, and not yet drawn.

        An empty batch is a step like any other: its gradient is noise.
        """
        if batch.scheme != self.plan.scheme:
            raise PlanChanged(
                f"the batch was drawn by {batch.scheme}, and {self.plan.scheme} is accounted for; "
                "make the mechanism with the sampler that draws the batches"
            )
        step = next(self._steps)
        with step_draws(self._randomness, step, batch.indices.device):
            bounded = self.query(model, loss, batch)
        if bounded.unit is not self.plan.unit:
            raise PlanChanged(f"the query bounds a {bounded.unit}, planned was a {self.plan.unit}")
        sensitivities = bounded.sensitivities(self.plan.relation)
        beside = bounded.statistic_sensitivities(self.plan.relation)
        stds_beside = [statistic.std for statistic in bounded.statistics]
        z = self.plan.noise_multiplier
        left = noise_left(z, joint_noise_multiplier(beside, stds_beside))
        stds = self.allocation(sensitivities, sizes_of(bounded.blocks), left)
        joint = joint_noise_multiplier([*sensitivities, *beside], [*stds, *stds_beside])
        if not joint >= z * (1 - 1e-9):  # written so that NaN is refused too
            raise ValueError(
                f"{type(self.allocation).__name__} gives a joint noise multiplier of {joint}, less "
                f"than the {z} that is accounted for; see Allocation for the formula"
            )
        self.noise_of = {
            name: std / bounded.divisor / (1.0 if block.factors is None else block.factors[place])
            for block, std in zip(bounded.blocks, stds, strict=True)
            for place, name in enumerate(block.names)
        }
        return PrivateGradient(self.plan, bounded, stds, self._randomness, batch, step)
