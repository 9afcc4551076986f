"""`tacit trade-off`: the figures, the picture, saved runs, and mistakes named."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import norm
from typer.testing import CliRunner

from tacit import Relation, epsilon, trade_off
from tacit.accounting import Plan, gaussian_dp_mu, gaussian_trade_off
from tacit.accounting.f_dp import plot_trade_offs
from tacit.cli import app
from tacit.sampling import MiniSets, Poisson
from tacit.sampling.scheme import Unit

SETS = [
    "--sampling", "mini-sets", "--records", "640", "--batch-size", "64", "--steps", "20",
    "--delta", "1e-5",
]  # fmt: skip


def answer(*arguments: str) -> dict:
    result = CliRunner().invoke(app, ["trade-off", *arguments, "--json"])
    assert result.exit_code == 0, result.exception
    return json.loads(result.stdout)


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["trade-off", *arguments])
    assert isinstance(result.exception, ValueError)
    return str(result.exception)


def test_blocks_on_mini_sets() -> None:
    (facts,) = answer("--noise-multiplier", "3", "--layers", "4", *SETS)["curves"]
    scheme, sets = MiniSets(10, 64, chosen=1), {"unit": Unit.MINI_SET}
    between = Relation.REPLACE_ONE
    curve = trade_off(1.5, scheme, 20, relation=between, **sets)
    assert facts["noise_multiplier"] == 1.5
    assert facts["epsilon"] == epsilon(1.5, scheme, 20, delta=1e-5, relation=between, **sets)
    for row in facts["errors"]:
        assert row["type_two"] == pytest.approx(curve(row["type_one"])[0])
    assert facts["clt_mu_not_a_guarantee"] == gaussian_dp_mu(1.5, scheme, 20, **sets).mu
    assert facts["relation"] == "replace-one"
    assert "note" not in facts


def test_without_sampling_it_is_gaussian() -> None:
    (facts,) = answer("--noise-multiplier", "2", "--sampling-rate", "1", "--steps", "4",
                      "--delta", "1e-5")["curves"]  # fmt: skip
    for row in facts["errors"]:
        exact = norm.sf(norm.ppf(row["type_one"]) + 1.0)
        assert row["type_two"] == pytest.approx(exact, abs=1e-5)
    assert facts["advantage_of_the_best_test"] == pytest.approx(2 * norm.cdf(0.5) - 1)
    assert facts["gaussian_mu_of_the_curve"] == pytest.approx(1, abs=3e-4)


def test_a_poisson_rate_from_records_and_batch() -> None:
    told = ["--noise-multiplier", "1", "--steps", "3", "--delta", "1e-5"]
    by_size = answer(*told, "--records", "500", "--batch-size", "50")["curves"]
    assert by_size == answer(*told, "--sampling-rate", "0.1")["curves"]


def test_too_little_noise_is_called_by_its_name() -> None:
    (facts,) = answer("--noise-multiplier", "0.1", *SETS)["curves"]
    assert facts["note"].startswith("this is no privacy")
    told = ["epsilon", "--noise-multiplier", "0.1", *SETS, "--json"]
    result = CliRunner().invoke(app, told)
    spent = json.loads(result.stdout)
    assert spent["epsilon"] == facts["epsilon"]
    assert spent["note"] == facts["note"]
    table = CliRunner().invoke(app, ["trade-off", "--noise-multiplier", "0.1", *SETS]).stdout
    assert "this is no privacy" in " ".join(table.replace("│", " ").split())


def test_noise_for_mini_sets_keeps_the_budget() -> None:
    result = CliRunner().invoke(app, ["noise", "--epsilon", "3", *SETS, "--json"])
    facts = json.loads(result.stdout)
    (there,) = answer("--noise-multiplier", str(facts["noise_multiplier"]), *SETS)["curves"]
    assert there["epsilon"] == pytest.approx(facts["epsilon"], rel=1e-6)
    assert there["epsilon"] <= 3


def saved(folder: Path, plan: Plan, **changes: object) -> Path:
    """run.json as a run writes it, as far as the plan goes."""
    folder.mkdir()
    taken = plan.steps or 0
    facts = {
        "plan": json.loads(plan.to_json()),
        "stopped": "plan complete",
        "steps": taken,
        "delta": 1e-5,
        "epsilon": plan.epsilon(int(changes.get("steps", taken)), 1e-5),
        **changes,
    }
    (folder / "run.json").write_text(json.dumps(facts))
    return folder


PLAN = Plan(Poisson(0.1), 1.0, Relation.ADD_OR_REMOVE_ONE, 12)


def test_a_saved_run(tmp_path: Path) -> None:
    folder = saved(tmp_path / "x", PLAN)
    told = answer(str(folder))
    assert told["curves"][0]["steps"] == 12
    assert told["curves"][0]["epsilon"] == pytest.approx(PLAN.epsilon(12, 1e-5))
    assert (folder / "trade_off.png").read_bytes().startswith(b"\x89PNG")
    old = tmp_path / "old"
    old.mkdir()
    facts = json.loads((folder / "run.json").read_text())
    facts["config"] = {"used": {"plan": json.dumps(facts.pop("plan"))}}
    (old / "run.json").write_text(json.dumps(facts))
    assert answer(str(old))["curves"][0]["errors"] == told["curves"][0]["errors"]


def test_a_run_that_ended_early_answers_for_its_plan_unless_its_budget_ended_it(
    tmp_path: Path,
) -> None:
    early = saved(tmp_path / "a", PLAN, stopped="asked to", epsilon=PLAN.epsilon(12, 1e-5), steps=5)
    spent = saved(tmp_path / "b", PLAN, stopped="budget", steps=5)
    told = answer(str(early), str(spent), "--out", str(tmp_path / "both.png"))["curves"]
    assert [facts["steps"] for facts in told] == [12, 5]


def test_a_run_whose_figures_do_not_add_up_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "x", PLAN, epsilon=2 * PLAN.epsilon(12, 1e-5))
    assert "continued from another" in refused(str(folder))


def test_mistakes_are_named(tmp_path: Path) -> None:
    folder = saved(tmp_path / "x", PLAN)
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / "run.json").write_text("{}")
    assert "--noise-multiplier, --steps and --delta" in refused()
    assert "not both" in refused(str(folder), "--delta", "1e-5")
    assert "--out" in refused(str(folder), str(folder))
    assert "no run.json" in refused(str(tmp_path / "nothing"))
    assert "does not hold a run's plan" in refused(str(tmp_path / "y"))
    told = ["--noise-multiplier", "1", "--steps", "1", "--delta", "1e-5"]
    assert "--sampling-rate" in refused(*told)
    assert "at most all" in refused(*told, "--records", "5", "--batch-size", "9")
    assert "not both" in refused(*told, "--sampling-rate", "0.1", "--records", "9")
    assert "give at least 1" in refused(*told, "--sampling-rate", "0.1", "--layers", "0")


def test_the_picture_names_what_is_no_guarantee(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    seen: list[Figure] = []
    keep = Figure.savefig
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda f, *a, **k: seen.append(f) or keep(f, *a, **k))
        curves = {"run": gaussian_trade_off(1.0), "other": gaussian_trade_off(0.0)}
        limit = gaussian_dp_mu(1.0, Poisson(0.1), 50)
        plot_trade_offs(curves, tmp_path / "x.png", {"run": limit})
    (axes,) = seen[0].axes
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels[0] == "run (exact)"
    assert "CLT, not a guarantee" in labels[1]
    assert labels[2] == "other (exact)"
    drawn = {line.get_label(): line for line in axes.get_lines()}
    assert drawn[labels[1]].get_linestyle() == "--"
    alphas, errors = drawn["run (exact)"].get_data()
    assert np.all(errors <= norm.sf(norm.ppf(alphas) + 1.0) + 1e-12)
    assert math.isclose(errors[0], 1.0)
    with pytest.raises(ValueError, match="at least one"):
        plot_trade_offs({}, tmp_path / "y.png")
