"""Accuracy against ε over runs, and a picture of everything."""

from __future__ import annotations

import pytest
import torch
from small_run import fit, some_records

import tacit
from tacit.diagnostics import (
    ActivationNorms,
    ClippingAlignment,
    ConfusionHistory,
    Curvature,
    GradientNormHistory,
    WeightNorms,
    accuracy_curve,
    plot_ablation,
    plot_accuracy_against_epsilon,
    plot_alignment,
    plot_confusion,
    plot_curvature,
    plot_gradient_norm_histograms,
    plot_norms,
)
from tacit.losses import CrossEntropy, TailoredLoss

torch.set_num_threads(1)
PNG = b"\x89PNG"
LOSSES = {"cross-entropy": CrossEntropy(), "tailored": TailoredLoss(1.0, beta=1.0, gamma=2.0)}
PLOTS = {
    WeightNorms: plot_norms,
    ActivationNorms: plot_norms,
    GradientNormHistory: plot_gradient_norm_histograms,
    ClippingAlignment: plot_alignment,
    Curvature: plot_curvature,
    ConfusionHistory: plot_confusion,
}


def facts(*points):
    return {"history": [{"epsilon": e, "accuracy": a} for e, a in points]}


def test_the_curve_has_least_median_and_largest_of_the_runs():
    runs = [
        facts((1.0, 0.5), (2.0, 0.6)),
        facts((1.0, 0.3), (2.0, 0.9)),
        facts((1.0, 0.4), (2.0, 0.7)),
    ]
    curve = accuracy_curve(runs)
    assert curve.epsilons == (1.0, 2.0)
    assert curve.least == (0.3, 0.6)
    assert curve.median == (0.4, 0.7)
    assert curve.largest == (0.5, 0.9)
    assert curve.num_runs == 3


def test_runs_of_different_plans_count_with_what_they_had_by_then():
    curve = accuracy_curve([facts((0.5, 0.1), (2.0, 0.8)), facts((1.0, 0.4), (3.0, 0.6))])
    assert curve.epsilons == (1.0, 2.0, 3.0)
    assert curve.least == (0.1, 0.4, 0.6)
    assert curve.largest == (0.4, 0.8, 0.8)


def test_runs_files_and_folders_say_the_same(tmp_path):
    run = fit([], test=some_records(seed=9))
    tacit.save_run(run, tmp_path)
    curves = [accuracy_curve([r]) for r in (run, tmp_path, str(tmp_path / "run.json"), run.facts())]
    assert all(curve == curves[0] for curve in curves)
    assert len(curves[0].epsilons) == 4
    with pytest.raises(ValueError, match="evaluate_on"):
        accuracy_curve([fit([])])
    with pytest.raises(ValueError, match="0 runs"):
        accuracy_curve([])


@pytest.fixture(scope="module")
def measured():
    """Every diagnostic of two runs, by kind and by the run's name."""
    found = {kind: {} for kind in PLOTS}
    for name, loss in LOSSES.items():
        for kind in PLOTS:
            more = {} if kind is WeightNorms else {"max_records": 8}
            found[kind][name] = kind(every=3, **more)
        fit([found[kind][name] for kind in PLOTS], loss=loss, steps=6)
    return found


@pytest.mark.parametrize("kind", PLOTS)
def test_every_diagnostic_has_a_picture(kind, measured, tmp_path):
    PLOTS[kind](measured[kind], tmp_path / "together.png")
    measured[kind]["tailored"].plot(tmp_path / "alone.png")
    for name in ("together.png", "alone.png"):
        assert (tmp_path / name).read_bytes().startswith(PNG)


def test_the_notice_is_drawn(tmp_path, monkeypatch):
    """A picture without its notice is another picture."""
    diagnostic = ConfusionHistory()
    fit([diagnostic])
    diagnostic.plot(tmp_path / "with.svg")
    monkeypatch.setattr(ConfusionHistory, "notice", "")
    diagnostic.plot(tmp_path / "without.svg")
    size = [(tmp_path / name).stat().st_size for name in ("with.svg", "without.svg")]
    assert size[0] > 1.01 * size[1]


def test_gradients_that_are_all_zero_have_a_picture(tmp_path):
    diagnostic = GradientNormHistory(some_records(seed=4), max_records=4)
    fit([diagnostic], loss=lambda h, y: 0 * h.sum(dim=1))
    diagnostic.plot(tmp_path / "zero.png", max_norm=0.5)


def test_accuracy_and_ablation_pictures(tmp_path):
    groups = {
        "CE": [facts((1.0, 0.5), (2.0, 0.6)), facts((1.0, 0.4), (2.0, 0.62))],
        "tailored": [facts((1.0, 0.6), (2.0, 0.63)), facts((1.0, 0.55), (2.0, 0.66))],
    }
    plot_accuracy_against_epsilon(groups, tmp_path / "a.png", title="digits")
    plot_ablation({"CE": [0.5, 0.52], "SSE": [0.6]}, tmp_path / "b.png")
    for name in ("a.png", "b.png"):
        assert (tmp_path / name).read_bytes().startswith(PNG)
    for wrong in ({}, {"CE": []}):
        with pytest.raises(ValueError, match="at least one accuracy"):
            plot_ablation(wrong, tmp_path / "c.png")
