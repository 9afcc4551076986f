"""`tacit audit` and `tacit attack`, as a user calls them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tacit.accounting import Plan
from tacit.auditing import audit_step
from tacit.budget import Relation
from tacit.cli import app
from tacit.cli.audit_commands import route_of
from tacit.noise import GlobalNoise, PerLayerNoise
from tacit.sampling import MiniSets, Poisson, Scheme, Unit

QUICK = ["--steps", "3", "--epsilon", "3", "--delta", "1e-4", "--quiet", "--seed", "0"]
FEW = ["--trials", "50000", "--seed", "1", "--json"]


def call(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, (result.exception, result.stdout)
    return result.stdout


def refused(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert isinstance(result.exception, ValueError), result.stdout
    return str(result.exception)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "x"
    call("train", *QUICK, "--out", folder)
    return folder


@pytest.fixture(scope="module")
def of_a_table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tables")
    generator = np.random.default_rng(0)
    x = generator.uniform(-1, 1, size=(400, 5))
    np.savez(place / "table.npz", X=x, y=(x[:, 0] > 0).astype(int))
    source = ["--data", place / "table.npz", "--target", "y", "--classes", "0,1"]
    declared = ["--public-size", 400, "--feature-range=-1,1"]
    call("train", *QUICK, *source, *declared, "--out", place / "run")
    return place


def test_a_run_is_audited(folder: Path, tmp_path: Path) -> None:
    facts = json.loads(call("audit", folder, *FEW, "--out", tmp_path / "a.png"))
    assert facts["epsilon"] == pytest.approx(facts["epsilon_reported"], rel=0.01)
    assert 0.6 * facts["epsilon"] < facts["epsilon_at_least"] < facts["epsilon"]
    assert not facts["refuted"]
    step = facts["step"]
    assert step["route"].startswith("PerSampleClip(max_norm=0.25")
    assert step["share_of_bound"] > 0.99
    assert 0 < step["bounds"][0]["epsilon"] < step["claimed"]
    assert [bound["assumes"] is None for bound in step["bounds"]] == [True, False]
    assert (tmp_path / "a.png").exists()


def test_the_table_names_the_assumption(folder: Path) -> None:
    text = " ".join(call("audit", folder, "--trials", 20000, "--seed", 1).split())
    assert "the claim stands this attack" in text
    assert "proves no upper bound" in text
    assert "assumes" in text


SETS = MiniSets(20, 8, chosen=5)


@pytest.mark.parametrize(
    ("query", "used", "scheme", "unit", "route"),
    [
        ("clipless", {"gradient_clip": 4.3}, Poisson(0.5), Unit.RECORD, "Clipless(gradient_clip=4"),
        ("batch-clip", {"max_norm": 0.5, "noise": "per-layer", "blocks_by": "layer"}, SETS,
         Unit.MINI_SET, "BatchClip(max_norm=0.5, mini_set_size=8"),
        ("clip", {"max_norm": None, "rule": "normalise"}, SETS, Unit.RECORD, "PerSampleClip(max_"),
    ],
)  # fmt: skip
def test_the_route_is_rebuilt_from_the_facts(
    query: str, used: dict[str, Any], scheme: Scheme, unit: Unit, route: str
) -> None:
    facts = {"config": {"settings": {"clipping": {"query": query}}, "used": used}}
    plan = Plan(scheme, 1.0, Relation.REPLACE_ONE, 10, unit)
    found, allocation = route_of(facts, plan)
    assert repr(found).startswith(route)
    assert isinstance(allocation, PerLayerNoise if "noise" in used else GlobalNoise)
    assert repr(route_of({}, plan)[0]).startswith("BatchClip" if unit is Unit.MINI_SET else "Per")
    audit = audit_step(found, scheme, 1.0, plan.relation, trials=50_000, allocation=allocation)
    assert 0.99 < audit.share_of_bound <= 1


def test_a_claim_that_is_too_small_is_refuted(folder: Path, tmp_path: Path) -> None:
    """run.json reports half of what its plan costs."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    facts = json.loads((copy / "run.json").read_text())
    facts["epsilon"] = facts["epsilon"] / 2
    (copy / "run.json").write_text(json.dumps(facts))
    found = json.loads(call("audit", copy, *FEW))
    assert found["epsilon_at_least"] > found["epsilon_reported"]
    assert found["refuted"]


def test_a_run_is_attacked(folder: Path, tmp_path: Path) -> None:
    facts = json.loads(call("attack", folder, "--json", "--out", tmp_path / "b.png", "--seed", 1))
    assert "not a guarantee" in facts["note"]
    names = [one["attack"] for one in facts["attacks"]]
    assert len(names) == 4
    for one in facts["attacks"]:
        assert 0.35 < one["auroc"]["value"] < 0.65
        assert one["members"] > one["non_members"] > 100
    text = call("attack", folder, "--seed", 1)
    assert "not a guarantee" in text
    assert (tmp_path / "b.png").exists()


def test_a_run_of_a_table_needs_the_table(of_a_table: Path, tmp_path: Path) -> None:
    run = of_a_table / "run"
    before: dict[str, Any] = json.loads(call("attack", run, "--json", "--seed", 1))
    moved = tmp_path / "moved.npz"
    shutil.move(of_a_table / "table.npz", moved)
    try:
        assert "is not there; give the file with --data" in refused("attack", run)
        after = json.loads(call("attack", run, "--data", moved, "--json", "--seed", 1))
    finally:
        shutil.move(moved, of_a_table / "table.npz")
    assert after["attacks"] == before["attacks"]


def test_what_cannot_be_done_is_refused(folder: Path, tmp_path: Path) -> None:
    assert "--trials is 10" in refused("audit", folder, "--trials", 10)
    assert "ends in .png" in refused("audit", folder, "--out", tmp_path / "a.txt")
    assert "which is a folder" in refused("attack", folder, "--out", tmp_path)
    assert "--confidence is 2" in refused("audit", folder, "--confidence", 2)
    assert "leave --data out" in refused("attack", folder, "--data", "x.csv")
    both = refused("attack", folder, "--data", "x.csv", "--dataset", "digits")
    assert "both --data and --dataset" in both
    assert "run.json" in refused("audit", tmp_path)
    for damaged in (
        [],
        {"used": {"noise": []}},
        {"settings": {"x": 3}},
        {"used": {"max_norm": "a"}},
    ):
        with pytest.raises(ValueError, match="does not hold a run's route"):
            route_of({"config": damaged or [1]}, Plan(Poisson(0.5), 1.0, Relation.REPLACE_ONE, 1))
    quiet = tmp_path / "quiet"
    call("train", *QUICK, "--noise-multiplier", 0, "--epsilon", 1e9, "--out", quiet)
    assert "no noise" in refused("audit", quiet)
