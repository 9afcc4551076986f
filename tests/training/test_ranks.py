"""One run on several ranks is the run on one: the same noise, the same gradients, the same ε."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

import tacit
from tacit.randomness import Randomness
from tacit.ranks import Ranks, share_of
from tacit.statistics import PublicStatistics
from tacit.training import Callback, Checkpoint, MovingAverage

WORLDS = (1, 2, 4)
STEPS = 4


class Tied(nn.Module):
    """Two layers with one weight, and a layer that no record moves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(torch.tanh(self.first(x))))


def network(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "tied":
        return Tied().double()
    if kind == "batch norm":
        layers = [nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3)]
        return nn.Sequential(*layers).double()
    if kind == "clipless":
        ordinary = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).double()
        return tacit.lipschitz_twin(ordinary).model
    if kind == "narrow":  # fewer rows than ranks
        return nn.Linear(6, 3).double()
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    if kind == "frozen":
        model[0].requires_grad_(False)
    return model.float() if kind == "noise alone" else model


def records(count: int, kind: str) -> tacit.Records:
    generator = torch.Generator().manual_seed(2 if kind == "public" else 1)
    inputs = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    targets = torch.randint(3, (count,), generator=generator)
    return tacit.Records(inputs, targets, public_size=count)


class Keep(Callback):
    """What was released in each step."""

    def __init__(self) -> None:
        self.released: list[dict[str, Tensor]] = []

    def on_step(self, trainer: tacit.Trainer, step: int) -> None:
        grads = {n: p.grad for n, p in trainer.model.named_parameters() if p.grad is not None}
        self.released.append({n: whole(g).clone() for n, g in grads.items()})


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def train(kind: str, mode: str, mesh: DeviceMesh | None, **more: object) -> dict[str, object]:
    model = network(kind)
    if mode == "sharded":
        for layer in () if kind == "tied" else model.children():
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    count, batch, physical = (6, 1, None) if kind == "empty shares" else (40, 12, None)
    if kind == "pieces":
        physical = 2
    data = records(count, kind)
    sampler: tacit.Sampler = tacit.PoissonSampler(
        data,
        1e-12 if kind == "noise alone" else batch / count,  # so that no record is drawn
        expected_batch_size=batch,
        steps=STEPS,
        max_physical_batch=physical,
    )
    query: object = tacit.PerSampleClip(
        tacit.AdaptiveNorm(1.0) if kind == "adaptive" else 1.0,
        blocks=tacit.queries.by_layer if kind == "layers" else None,
    )
    budget, statistics = tacit.Budget(30.0, 1e-5), None
    if kind == "clipless":
        query = tacit.Clipless()
    if kind == "batch norm":
        query = tacit.BatchClip(1.0, mini_set_size=4)
        sampler = tacit.MiniSetSampler(data, 4, steps=STEPS, chosen=3)
        budget = tacit.Budget(30.0, 1e-5, relation=tacit.Relation.REPLACE_ONE)
        statistics = PublicStatistics(records(30, "public"), 4)
    kept = Keep()
    trained = [p for p in model.parameters() if p.requires_grad]
    trainer = tacit.Trainer(
        model,
        tacit.losses.CrossEntropy(0.5),
        query,
        sampler,
        torch.optim.SGD(trained, lr=0.1, momentum=0.9),
        budget,
        noise=tacit.Noise(1.0),
        statistics=statistics,
        callbacks=[kept],
        mesh=mesh,
        seed=3,
        **more,
    )
    run = trainer.fit()
    weights = {name: whole(p) for name, p in model.named_parameters()}
    return {"released": kept.released, "weights": weights, "epsilon": run.epsilon, "run": run.steps}


KINDS = (
    "plain", "tied", "frozen", "layers", "adaptive", "clipless", "batch norm", "pieces",
    "empty shares", "noise alone", "narrow",
)  # fmt: skip


def on_rank(rank: int, world: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    found: dict[object, object] = {}
    for mode in ("replicated", "sharded"):
        for kind in KINDS:
            found[kind, mode] = train(kind, mode, mesh)
    found["refused"] = refused(mesh)
    found["frozen resumed"] = frozen_resumed(mesh, Path(folder) / f"frozen{world}")
    if world == 2:
        found["mistakes"] = mistakes(mesh, rank)
    found["interrupted"] = interrupted(mesh, Path(folder) / f"interrupted{world}", world == 4)
    torch.save(found, f"{folder}/{world}_{rank}.pt")
    dist.destroy_process_group()


def refused(mesh: DeviceMesh | None) -> dict[str, object]:
    """A ledger with room for two steps, and what every rank makes of it."""
    data = records(40, "plain")
    model = network("plain")
    sampler = tacit.PoissonSampler(data, expected_batch_size=12, steps=STEPS)
    plan = tacit.Mechanism(tacit.PerSampleClip(1.0), sampler, 1.0).plan
    trainer = tacit.Trainer(
        model,
        nn.CrossEntropyLoss(),
        tacit.PerSampleClip(1.0),
        sampler,
        torch.optim.SGD(model.parameters(), lr=0.1),
        tacit.Budget(plan.epsilon_of_count(2, 1e-5) + 1e-3, 1e-5),
        noise=tacit.Noise(1.0),
        callbacks=[],
        mesh=mesh,
    )
    run = trainer.fit()
    return {"stopped": run.stopped, "steps": run.steps}


def interrupted(mesh: DeviceMesh, folder: Path, sharded: bool) -> dict[str, object]:
    """Two steps, a checkpoint, and the rest by objects that were made anew."""

    class Stop(Callback):
        def on_step(self, trainer: tacit.Trainer, step: int) -> None:
            if step == 2:
                raise RuntimeError("stopped")

    def trainer(*callbacks: Callback) -> tacit.Trainer:
        model = network("plain")
        if sharded:
            fully_shard(model, mesh=mesh)
        sampler = tacit.PoissonSampler(records(40, "plain"), expected_batch_size=12, steps=STEPS)
        return tacit.Trainer(
            model,
            nn.CrossEntropyLoss(),
            tacit.PerSampleClip(1.0),
            sampler,
            torch.optim.Adam(model.parameters(), lr=0.1),
            tacit.Budget(3.0, 1e-5),
            callbacks=callbacks,
            ledger=folder.parent / f"{folder.name}.sqlite",
            checkpoint=Checkpoint(folder, every=1),
            mesh=mesh,
        )

    with pytest.raises(RuntimeError, match="stopped"):
        trainer(Stop()).fit()
    dist.barrier()
    resumed = trainer()
    run = resumed.fit(resume=folder)
    weights = {name: whole(p) for name, p in resumed.model.named_parameters()}
    return {"steps": run.steps, "notes": run.notes, "weights": weights, "epsilon": run.epsilon}


def frozen_resumed(mesh: DeviceMesh, folder: Path) -> dict[str, object]:
    """A sharded run with a frozen layer and an average, resumed by a model with other weights."""

    def trainer(seed: int, *callbacks: Callback) -> tacit.Trainer:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)).double()
        model[0].requires_grad_(False)
        fully_shard(model, mesh=mesh)
        sampler = tacit.PoissonSampler(records(40, "plain"), expected_batch_size=12, steps=STEPS)
        return tacit.Trainer(
            model,
            nn.CrossEntropyLoss(),
            tacit.PerSampleClip(1.0),
            sampler,
            torch.optim.SGD(model[2].parameters(), lr=0.1),
            tacit.Budget(3.0, 1e-5),
            moving_average=MovingAverage(0.5),
            callbacks=callbacks,
            ledger=folder.parent / f"{folder.name}.sqlite",
            checkpoint=Checkpoint(folder, every=1),
            mesh=mesh,
        )

    begun = trainer(0, Nested(), StopAt(3))
    with pytest.raises(RuntimeError, match="stopped"):
        begun.fit()
    dist.barrier()
    resumed = trainer(1)
    resumed.fit(resume=folder)
    same = torch.equal(whole(begun.model[0].weight), whole(resumed.model[0].weight))
    return {"frozen": same}


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, trainer: tacit.Trainer, step: int) -> None:
        if step == self.step:
            raise RuntimeError("stopped")


class Nested(Callback):
    def on_step(self, trainer: tacit.Trainer, step: int) -> None:
        with trainer.whole_model():
            with trainer.whole_model():
                pass
            trainer.model(torch.zeros(1, 6, dtype=torch.float64))


def mistakes(mesh: DeviceMesh, rank: int) -> dict[str, str]:
    """What two ranks say that were not given the same, and how much was charged."""
    said = {}
    ranks = Ranks(mesh)

    def release(shared: bool, noise: float, order: bool) -> None:
        model, data = network("plain"), records(40, "plain")
        if order and rank:
            data = tacit.Records(data.inputs.flip(0), data.targets.flip(0), public_size=40)
        sampler = tacit.PoissonSampler(data, expected_batch_size=12, steps=STEPS)
        if shared:
            sampler.share(ranks)
        mechanism = tacit.Mechanism(tacit.PerSampleClip(1.0), sampler, noise)
        ledger = tacit.ledger.SharedLedger(
            ranks, lambda: tacit.Ledger(None, tacit.Budget(100.0, 1e-5))
        )
        ledger.begin(mechanism.plan)
        pending = mechanism.privatise(model, nn.CrossEntropyLoss(), sampler.next_batch())
        try:
            ledger.release(pending, into=model)
        finally:
            assert ledger.run_status()[0] == 0
            assert all(p.grad is None for p in model.parameters())

    for name, given in {
        "not shared": (False, 1.0, False),
        "noise": (True, 1.0 + rank, False),
        "order": (True, 1.0, True),
    }.items():
        try:
            release(*given)
        except (ValueError, tacit.errors.TacitError) as error:
            said[name] = str(error)
    try:
        ranks.from_first(1, "one thing" if rank else "another thing")
    except RuntimeError as error:
        said["place"] = str(error)
    return said


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], dict]:
    """What each rank of each number of ranks found; 0 ranks are a run without a mesh."""
    folder = tmp_path_factory.mktemp("ranks")
    found: dict[tuple[int, int], dict] = {}
    for world in WORLDS:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        mp.spawn(on_rank, (world, port, str(folder)), world)
        for rank in range(world):
            file = folder / f"{world}_{rank}.pt"
            found[world, rank] = torch.load(file, weights_only=False)
    found[0, 0] = {(kind, "replicated"): train(kind, "replicated", None) for kind in KINDS}
    return found


def ranks_of(world: int) -> Iterator[tuple[int, int]]:
    return ((world, rank) for rank in range(world))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["replicated", "sharded"])
@pytest.mark.parametrize("world", WORLDS)
def test_many_ranks_release_what_one_releases(results, kind, mode, world):
    alone = results[0, 0][kind, "replicated"]
    for place in ranks_of(world):
        found = results[place][kind, mode]
        assert found["epsilon"] == alone["epsilon"]
        assert len(found["released"]) == len(alone["released"]) == STEPS
        for ours, theirs in zip(found["released"], alone["released"], strict=True):
            assert ours.keys() == theirs.keys()
            for name in ours:
                assert torch.allclose(ours[name], theirs[name], rtol=0, atol=1e-12), name
        for name, weight in found["weights"].items():
            assert torch.allclose(weight, alone["weights"][name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("mode", ["replicated", "sharded"])
def test_the_noise_is_the_same_to_the_bit(results, mode):
    """No record is drawn here, so that nothing but noise is released."""
    alone = results[0, 0]["noise alone", "replicated"]["released"]
    for world in WORLDS:
        for place in ranks_of(world):
            released = results[place]["noise alone", mode]["released"]
            for ours, theirs in zip(released, alone, strict=True):
                assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert all(bool((g != 0).all()) for g in alone[0].values())


@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_have_the_same_bits(results, kind):
    for world in WORLDS:
        first = results[world, 0][kind, "replicated"]["weights"]
        for place in ranks_of(world):
            weights = results[place][kind, "replicated"]["weights"]
            assert all(torch.equal(weights[name], first[name]) for name in first)


def test_a_refusal_reaches_every_rank(results):
    for world in WORLDS:
        for place in ranks_of(world):
            assert results[place]["refused"] == {"stopped": "budget", "steps": 2}


def test_a_run_of_many_ranks_goes_on_from_its_checkpoint(results):
    for world in WORLDS:
        for place in ranks_of(world):
            found = results[place]["interrupted"]
            assert found["steps"] == STEPS - 1  # the one after the checkpoint stays charged
            assert any("resumed from a checkpoint once at step" in note for note in found["notes"])
            first = results[world, 0]["interrupted"]["weights"]
            assert all(torch.equal(found["weights"][name], first[name]) for name in first)


def test_frozen_weights_of_a_checkpoint_are_those_of_the_model(results):
    assert all(found["frozen resumed"]["frozen"] for (w, _), found in results.items() if w)


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        ("not shared", "one charge"),
        ("noise", "differ in the step that they are about to release"),
        ("order", "differ in their records"),
    ],
)
def test_ranks_that_were_not_given_the_same_release_nothing(results, mistake, says):
    for place in ranks_of(2):
        assert says in results[place]["mistakes"][mistake]


def test_an_answer_to_another_question_is_not_taken(results):
    assert "place" not in results[2, 0]["mistakes"]
    assert "waits for one thing" in results[2, 1]["mistakes"]["place"]


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("rows", [0, 1, 7, 40])
def test_shares_are_a_partition(rows, count):
    drawn, ids = np.random.RandomState(0).permutation(100)[:rows], np.arange(100)
    shares = [share_of(drawn, None, ids, rank, count) for rank in range(count)]
    assert sorted(np.concatenate([own for own, _, _ in shares])) == sorted(drawn)
    assert {most for _, _, most in shares} == {max(len(own) for own, _, _ in shares)}


@pytest.mark.parametrize("count", [2, 3, 8])
def test_no_record_moves_another_to_another_rank(count):
    ids = np.random.RandomState(1).permutation(1000)[:50]
    fewer = np.delete(ids, 20)
    for rank in range(count):
        own, _, _ = share_of(np.arange(50), None, ids, rank, count)
        without, _, _ = share_of(np.arange(49), None, fewer, rank, count)
        assert set(ids[own]) - set(fewer[without]) <= {ids[20]}
        assert set(fewer[without]) <= set(ids[own])


@pytest.mark.parametrize("step", [1, 2, 8, 1000])
def test_shares_are_even_whatever_ids_have_in_common(step):
    ids = step * np.arange(-500, 500)
    sizes = [len(share_of(np.arange(1000), None, ids, rank, 4)[0]) for rank in range(4)]
    assert min(sizes) > 200


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_a_mini_set_is_never_cut(count):
    sets = np.repeat([5, 2, 9, 4, 7], [3, 1, 4, 2, 3])
    rows = np.arange(len(sets))
    shares = [share_of(rows, sets, rows, rank, count) for rank in range(count)]
    owners = [set(own_sets) for _, own_sets, _ in shares]
    assert sum(map(len, owners)) == 5
    assert set().union(*owners) == {2, 4, 5, 7, 9}
    assert sorted(np.concatenate([own for own, _, _ in shares])) == list(rows)
    assert {most for _, _, most in shares} == {max(len(own) for own, _, _ in shares)}


@pytest.mark.parametrize("start", [0, 1, 7, 8, 13, 1000])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_noise_from_the_middle_is_the_noise_of_the_whole(start, device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    stream = Randomness(1).stream("noise", 0)
    whole = stream.normals([5000, 3000], torch.device(device), [4, 2])
    parts = stream.normals([100, 0], torch.device(device), [4, 2], [start, start])
    assert torch.equal(parts[0], whole[0][start : start + 100])
    assert parts[1].numel() == 0


def test_a_mesh_of_two_dimensions_is_refused(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="give one dimension"):
            Ranks(init_device_mesh("cpu", (1, 1)))
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_parts_that_are_kept_on_the_cpu_are_trained_on_the_gpu(tmp_path):
    def weights(mesh: DeviceMesh | None) -> list[Tensor]:
        model = network("plain")
        if mesh is None:
            model.cuda()
        else:
            fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
        trainer = tacit.Trainer(
            model,
            tacit.losses.CrossEntropy(0.5),
            tacit.PerSampleClip(1.0),
            tacit.PoissonSampler(records(40, "plain"), expected_batch_size=12, steps=STEPS),
            torch.optim.Adam(model.parameters(), lr=0.1),
            tacit.Budget(30.0, 1e-5),
            noise=tacit.Noise(1.0),
            callbacks=[],
            mesh=mesh,
            seed=3,
        )
        trainer.fit()
        parts = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
        kept = {part.device.type for part in parts}
        kept |= {p.grad.device.type for p in model.parameters() if p.grad is not None}
        assert kept == {"cuda" if mesh is None else "cpu"}
        return [part.detach().cpu() for part in parts]

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        offloaded = weights(init_device_mesh("cuda", (1,)))
    finally:
        dist.destroy_process_group()
    for one, other in zip(offloaded, weights(None), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
