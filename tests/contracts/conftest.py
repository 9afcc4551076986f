"""Fixtures over everything that is listed in `contract_cases` and `contract_models`."""

from __future__ import annotations

import pytest
import torch
from contract_cases import ALL_QUERIES, ALL_SAMPLERS, PAIRS, Pair, SamplerCase, first_pair

from tacit import Relation

torch.set_num_threads(1)  # the models are tiny, and pytest-xdist has a worker for every core


@pytest.fixture(params=PAIRS, ids=lambda pair: f"{pair[0].name}/{pair[1].name}")
def pair(request) -> Pair:
    return Pair(*request.param)


@pytest.fixture(
    params=[pair for pair in PAIRS if pair[1].continuous],
    ids=lambda pair: f"{pair[0].name}/{pair[1].name}",
)
def continuous_pair(request) -> Pair:
    """Pairs whose inputs are real numbers, and so can be huge, not finite, or ascended on."""
    return Pair(*request.param)


@pytest.fixture(
    params=[pair for pair in PAIRS if pair[0].adapts],
    ids=lambda pair: f"{pair[0].name}/{pair[1].name}",
)
def adapting_pair(request) -> Pair:
    """Pairs whose query releases statistics, and changes with them."""
    return Pair(*request.param)


@pytest.fixture(params=ALL_QUERIES, ids=lambda query: query.name)
def any_pair(request) -> Pair:
    """Each query with the first model that it takes, where the model does not matter."""
    return first_pair(request.param)


@pytest.fixture(params=ALL_SAMPLERS, ids=lambda sampler: sampler.name)
def sampler_case(request) -> SamplerCase:
    return request.param


@pytest.fixture(
    params=[sampler for sampler in ALL_SAMPLERS if sampler.by_id], ids=lambda sampler: sampler.name
)
def sampler_by_id(request) -> SamplerCase:
    return request.param


@pytest.fixture(params=list(Relation), ids=str)
def relation(request) -> Relation:
    return request.param
