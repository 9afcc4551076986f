"""`tacit train --query batch-clip`: mini-sets, BatchNorm and layerwise constants, end to end."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import tacit
from tacit.cli import app
from tacit.cli.build_model import Recipe
from tacit.cli.build_query import MiniSetDraw, blocks_for, check_batch_norm, mini_sets_for
from tacit.cli.settings import BatchClippingSettings, ClippingSettings

FAST = ["--query", "batch-clip", "--steps", "2", "--noise-multiplier", "2", "--epsilon", "50"]
FAST += ["--delta", "1e-4", "--quiet", "--json", "--seed", "0"]
SETS = ["--mini-set-size", "16", "--mini-sets", "3"]


def run(folder: Path, *arguments: str):
    return CliRunner().invoke(app, ["train", *FAST, "--out", str(folder), *arguments])


def facts_of(folder: Path, *arguments: str) -> dict:
    result = run(folder, *arguments)
    assert result.exit_code == 0, result.exception
    facts = json.loads(result.stdout)
    assert facts == json.loads((folder / "run.json").read_text())
    return facts


def test_sets_are_drawn_and_accounted_under_replace_one(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, *SETS)
    scheme = tacit.sampling.MiniSets(math.ceil(1797 / 16), 16, chosen=3)
    assert facts["sampling"] == scheme.describe()
    assert facts["relation"] == "replace-one"
    assert facts["config"]["used"]["batch_size"] == 48
    assert facts["config"]["used"]["public_records"] == 0
    assert facts["config"]["used"]["noise"] == "global"
    assert not any("public" in note and "given up" in note for note in facts["notes"])
    exact = tacit.epsilon(
        2.0,
        scheme,
        2,
        delta=1e-4,
        relation=tacit.Relation.REPLACE_ONE,
        unit=tacit.BatchClip(1, 16).unit,
    )
    assert facts["epsilon"] == pytest.approx(exact, rel=1e-9)


def test_each_set_with_a_probability_and_the_other_relation(tmp_path: Path) -> None:
    chance = ["--mini-set-size", "16", "--mini-set-rate", "0.1"]
    facts = facts_of(tmp_path / "a", *chance)
    other = facts_of(tmp_path / "b", *chance, "--relation", "add-or-remove-one")
    assert "each with probability 0.1" in facts["sampling"]
    assert other["relation"] == "add-or-remove-one"
    assert other["epsilon"] == facts["epsilon"]  # to the accountant a set is replaced either way
    assert facts["config"]["used"]["batch_size"] == pytest.approx(143.8)


def test_batch_norm_stays_and_the_run_is_read_back(tmp_path: Path) -> None:
    facts = facts_of(
        tmp_path, *SETS, "--model", "convnet", "--blocks", "layer", "--layerwise", "enhanced",
        "--max-norm", "0.3",
    )  # fmt: skip
    used = facts["config"]["used"]
    assert used["model_changes"] == []
    assert used["noise"] == "per-layer"
    assert used["num_blocks"] == 9
    assert used["public_records"] == 149
    first, last = used["expected_norms"]
    assert first[0] == last[0] == 0  # one estimate an epoch, and two steps are less than one
    assert len(first[1]) == 9
    notes = " ".join(facts["notes"])
    for words in ("given up as public", "estimated on public", "BatchNorm's statistics are"):
        assert words in notes
    _, test = tacit.load("digits")
    network = tacit.load_run(tmp_path).model
    norms = [m for m in network.modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(norms) == 4
    assert all(bool((m.running_mean != 0).any()) for m in norms)
    found = tacit.evaluate(network, test, tacit.losses.CrossEntropy())
    assert found.accuracy == pytest.approx(facts["accuracy"])
    curve = CliRunner().invoke(app, ["trade-off", str(tmp_path), "--json"])
    assert curve.exit_code == 0, curve.exception
    (row,) = json.loads(curve.stdout)["curves"]
    assert row["epsilon"] == pytest.approx(facts["epsilon"], rel=1e-4)
    certify = CliRunner().invoke(app, ["certify", str(tmp_path)])
    assert "no certificate" in str(certify.exception)


def test_a_lipschitz_network_by_batch_clipping_is_certified(tmp_path: Path) -> None:
    facts_of(tmp_path, *SETS, "--model", "lipschitz-mlp")
    certify = CliRunner().invoke(app, ["certify", str(tmp_path), "--json"])
    assert certify.exit_code == 0, certify.exception


def test_statistics_released_are_in_the_plan_and_charged(tmp_path: Path) -> None:
    model = [*SETS, "--model", "convnet"]
    facts = facts_of(tmp_path / "a", *model, "--statistics", "released", "--statistics-noise", "30")
    assert facts["plan"]["prelude"] == [30.0]
    assert facts["config"]["used"]["public_records"] == 0
    assert any("released with Gaussian noise of multiplier 30" in note for note in facts["notes"])
    public = facts_of(tmp_path / "b", *model, "--statistics", "public")
    assert public["plan"]["prelude"] == []
    assert facts["epsilon"] > public["epsilon"]


def test_convert_is_read_back_as_converted(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, *SETS, "--model", "convnet", "--statistics", "convert")
    assert len(facts["config"]["used"]["model_changes"]) == 4
    network = tacit.load_run(tmp_path).model
    assert sum(isinstance(m, nn.GroupNorm) for m in network.modules()) == 4


def test_factors_are_one_block_and_groups_are_few(tmp_path: Path) -> None:
    convnet = [*SETS, "--model", "convnet", "--blocks", "parameter"]
    factors = facts_of(tmp_path / "a", *convnet, "--layerwise", "factors", "--max-norm", "1")
    assert factors["config"]["used"]["noise"] == "global"
    assert factors["config"]["used"]["num_blocks"] == 18
    grouped = facts_of(
        tmp_path / "b", *convnet, "--layerwise", "enhanced", "--groups", "3",
        "--master-decay", "0.5", "--public-share", "0.2", "--sparsify", "1",
    )  # fmt: skip
    used = grouped["config"]["used"]
    assert used["num_blocks"] == len(used["blocks"]) == 3
    assert sum(map(len, used["blocks"])) == 18
    assert used["noise"] == "per-layer"
    assert 0 < used["share_frozen"] < 1
    assert "about 287 of 1438 records were given up" in " ".join(grouped["notes"])


@pytest.mark.parametrize("local", ["sgd", "momentum", "adam"])
def test_a_local_run_over_each_set(tmp_path: Path, local: str) -> None:
    found = facts_of(
        tmp_path / "a", *SETS, "--local", local, "--local-lr", "0.05", "--local-batch", "8"
    )
    plain = facts_of(tmp_path / "b", *SETS)
    assert found["loss"] != plain["loss"]
    assert found["epsilon"] == plain["epsilon"]


def test_rule_views_threshold_and_engine(tmp_path: Path) -> None:
    arguments = ["--mini-set-size", "8", "--mini-sets", "90", "--augment", "2"]
    facts = facts_of(
        tmp_path, *arguments, "--rule", "normalise", "--adaptive-quantile", "0.4",
        "--engine", "book-keeping",
    )  # fmt: skip
    (path,) = facts["config"]["used"]["thresholds"]
    assert len(path) == 3
    assert path[0] == 0.25


@pytest.mark.parametrize(
    ("engine", "used"),
    [
        ("automatic", None),
        ("book-keeping", tacit.queries.SetsAsRecords),
        ("set-by-set", tacit.queries.SetBySet),
    ],
)
def test_the_engine_that_is_asked_for_is_used(tmp_path: Path, monkeypatch, engine, used) -> None:
    engines, batch_clip = [], tacit.BatchClip

    def watched(*arguments, **options):
        engines.append(options["engine"])
        return batch_clip(*arguments, **options)

    monkeypatch.setattr(tacit.queries, "BatchClip", watched)
    facts = facts_of(tmp_path, *SETS, "--engine", engine)
    assert facts["config"]["settings"]["query"]["engine"] == engine
    assert [type(given) for given in engines] == [type(None) if used is None else used]


@pytest.mark.parametrize("name", ["none", "original", "enhanced", "factors"])
def test_layerwise_constants_of_per_sample_clipping(tmp_path: Path, name: str) -> None:
    query = ["--query", "clip", "--batch-size", "50", "--blocks", "layer"]
    facts = facts_of(tmp_path, *query, "--layerwise", name)
    used = facts["config"]["used"]
    assert len(used["expected_norms"][0][1]) == 2 if name != "none" else "blocks" not in used
    assert (used["max_norm"] is None) == (name == "original")
    assert facts["relation"] == "add-or-remove-one"
    assert used["noise"] == ("per-layer" if name in ("original", "enhanced") else "global")


def test_no_privacy_is_said(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, *SETS, "--noise-multiplier", "0.01", "--epsilon", "1e9")
    assert facts["notes"][0].startswith("this is no privacy")


BLOCKS = ["--blocks", "layer"]
WRONG = [
    (["--query", "clip", "--mini-set-size", "4"], "goes with --query batch-clip"),
    (["--query", "clipless", "--layerwise", "enhanced"], "goes with --query clip or"),
    (["--sampling", "poisson"], "leave --sampling out"),
    (["--mini-sets", "3", "--mini-set-rate", "0.1"], "leave one of them out"),
    (["--batch-size", "48", "--mini-set-rate", "0.1"], "leave one of them out"),
    (["--batch-size", "100", "--mini-set-size", "7"], "give two of the three"),
    (["--batch-size", "100", "--mini-set-size", "7", "--mini-sets", "3"], "give two of the three"),
    (["--mini-set-size", "0"], "--mini-set-size is 0"),
    (["--mini-set-size", "2000"], "give smaller sets"),
    (["--mini-sets", "9999"], "--mini-sets is 9999"),
    (["--layerwise", "enhanced"], "--blocks layer"),
    (["--groups", "2"], "--blocks layer"),
    ([*BLOCKS, "--groups", "9"], "give 1 up to 2"),
    ([*BLOCKS, "--layerwise", "original", "--max-norm", "1"], "leave one of them out"),
    ([*BLOCKS, "--layerwise", "enhanced", "--adaptive-quantile", "0.5"], "leave one of them out"),
    ([*BLOCKS, "--layerwise", "original", "--master-decay", "0.9"], "no master constant"),
    ([*BLOCKS, "--layerwise", "enhanced", "--master-decay", "3"], "at most 1"),
    (["--public-share", "0.2"], "nothing in this run uses public records"),
    ([*BLOCKS, "--layerwise", "enhanced", "--public-share", "2"], "between 0 and 1"),
    (["--model", "convnet"], "--statistics public"),
    (["--statistics", "public"], "no BatchNorm"),
    (["--model", "convnet", "--statistics", "released"], "needs --statistics-noise"),
    (["--model", "convnet", "--statistics-noise", "3"], "goes with --statistics released"),
    (["--model", "convnet", "--statistics", "public", "--mini-set-size", "200"], "do not fill"),
    (["--local", "sgd"], "needs --local-lr"),
    (["--local-batch", "3"], "goes with --local"),
    (["--engine", "per-record"], "give --engine automatic or book-keeping or set-by-set"),
    (["--query", "clip", "--engine", "set-by-set"], "automatic or book-keeping or per-record"),
    (["--engine", "book-keeping", "--local", "sgd", "--local-lr", "1"], "leave one of them out"),
    (["--sparsify", "0"], "--sparsify is 0"),
]


@pytest.mark.parametrize(("arguments", "says"), WRONG, ids=[" ".join(a) for a, _ in WRONG])
def test_a_wrong_combination_is_named(tmp_path: Path, arguments: list[str], says: str) -> None:
    result = run(tmp_path / "x", *arguments)
    assert isinstance(result.exception, ValueError)
    assert says in str(result.exception)
    assert not (tmp_path / "x").exists()


def test_a_wrong_argument_does_not_cost_the_run_that_is_there(tmp_path: Path) -> None:
    facts_of(tmp_path, *SETS)
    result = run(tmp_path, "--model", "convnet", "--overwrite")
    assert isinstance(result.exception, ValueError)
    assert (tmp_path / "run.json").exists()


def test_batch_norm_of_one_value_a_channel_is_refused() -> None:
    flat = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match=r"--mini-set-size 1 .* give at least 2"):
        check_batch_norm(flat, (4,), BatchClippingSettings(), 1)
    with pytest.raises(ValueError, match="--local-batch 1"):
        check_batch_norm(flat, (4,), BatchClippingSettings(local="sgd"), 9)
    check_batch_norm(flat, (4,), BatchClippingSettings(), 2)
    assert flat[2].num_batches_tracked == 0  # the pass of zeros left nothing behind
    image = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    check_batch_norm(image, (1, 5, 5), BatchClippingSettings(), 1)


@pytest.mark.parametrize(
    ("given", "drawn"),
    [
        ({}, MiniSetDraw(8, 20)),
        ({"mini_set_size": 100}, MiniSetDraw(100, 5)),  # at most half of the ten sets
        ({"mini_sets": 9}, MiniSetDraw(8, 9)),
        ({"batch_size": 40}, MiniSetDraw(8, 5)),
        ({"batch_size": 5}, MiniSetDraw(5, 1)),
        ({"batch_size": 40, "mini_sets": 2}, MiniSetDraw(20, 2)),
        ({"batch_size": 40, "mini_set_size": 10}, MiniSetDraw(10, 4)),
        ({"batch_size": 40, "mini_set_size": 10, "mini_sets": 4}, MiniSetDraw(10, 4)),
        ({"mini_set_rate": 0.5}, MiniSetDraw(8, rate=0.5)),
    ],
    ids=str,
)
def test_what_is_missing_follows_from_the_rest(given: dict, drawn: MiniSetDraw) -> None:
    recipe = Recipe(160, 1, 1.0, mini_set_size=8, mini_sets=20)
    batch_size = given.pop("batch_size", None)
    assert mini_sets_for(BatchClippingSettings(**given), batch_size, 1000, recipe) == drawn


def test_groups_go_by_the_norms_of_what_is_clipped() -> None:
    """The groups of mini-sets of 16 are those of their mean gradients, not of single records'."""
    torch.manual_seed(0)
    train, _ = tacit.load("digits")
    public, _ = tacit.split_public(train, 0.3)
    model, loss = tacit.models.mlp(train.shape, 10, hidden=(8, 8)), tacit.losses.CrossEntropy()
    found = blocks_for(ClippingSettings(blocks="layer", groups=2), model, loss, public, 16, None)
    probe = tacit.BatchClip(1.0, 16, blocks=tacit.by_layer)
    norms = probe.expected_norms(model, loss, public)
    assert found == tacit.queries.group_by_norm(tacit.by_layer(model), norms, 2)


@pytest.fixture
def table(tmp_path: Path) -> list[str]:
    rows = [f"{i / 7:.3f},{i % 5},{i % 2}" for i in range(200)]
    (tmp_path / "own.csv").write_text("\n".join(["a,b,y", *rows]))
    return ["--data", str(tmp_path / "own.csv"), "--target", "y", "--mini-set-size", "4"]


def test_rows_of_a_file_are_ids_under_replace_one(tmp_path: Path, table: list[str]) -> None:
    facts = facts_of(tmp_path / "x", *table, "--blocks", "layer", "--layerwise", "enhanced")
    assert facts["relation"] == "replace-one"
    assert "45 of 4 records" in facts["sampling"]  # 180 of 200 row numbers, test rows among them
    small = run(tmp_path / "y", *table, "--public-size", "150")
    assert "declare at least as many" in str(small.exception)


@pytest.mark.parametrize("query", ["batch-clip", "clip"])
def test_a_row_fewer_would_number_the_others_anew(
    tmp_path: Path, table: list[str], query: str
) -> None:
    """Sets and public records by row number hold for a row replaced, not for one taken out."""
    how = ["--blocks", "layer", "--layerwise", "enhanced", "--relation", "add-or-remove-one"]
    sets = table if query == "batch-clip" else [*table[:-2], "--query", "clip"]
    result = run(tmp_path / "x", *sets, *how)
    assert "give --relation replace-one" in str(result.exception)
    assert not (tmp_path / "x").exists()
