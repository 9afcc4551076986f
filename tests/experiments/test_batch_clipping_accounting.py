"""The paper's settings: its CLT figures are found again, and what they really cost is told."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from scipy.stats import norm

from experiments import runner
from experiments.batch_clipping import accounting
from experiments.batch_clipping.__main__ import PAPER


def test_the_paper_counts_layers_once_and_tensors_once() -> None:
    assert accounting.counted("lenet5") == {"by layer": 8, "by parameter": 16}
    assert accounting.counted("convnet") == {"by layer": 9, "by parameter": 18}
    assert accounting.counted("resnet18") == {"by layer": 41, "by parameter": 62}


@pytest.mark.parametrize(
    ("index", "exact", "mu", "h"), [(0, 2.08, 0.52, 1.513), (1, 9.70, 1.99, 5.783)]
)
def test_lenet5(index, exact, mu, h) -> None:
    """ε to the digits of the issue; h(σ/√8) and G_μ to those of the paper, from the formula too."""
    facts, curve, limit = accounting.row(accounting.SETTINGS[index], "by layer", 8, 50)
    assert round(facts["epsilon"], 2) == exact
    assert round(limit.mu, 2) == mu
    assert facts["clt_h"] == pytest.approx(h, abs=2e-3)  # the formula gives 1.514 and 5.783
    z = accounting.SETTINGS[index].sigma / math.sqrt(8)
    written = math.exp(z**-2) * norm.cdf(1.5 / z) + 3 * norm.cdf(-0.5 / z) - 2
    assert facts["clt_h"] == pytest.approx(math.sqrt(written), rel=1e-9)
    assert curve.epsilon(1e-5) == pytest.approx(exact, abs=0.006)
    assert not facts["no_privacy"]


def test_resnet18_has_no_privacy() -> None:
    facts, _, _ = accounting.row(accounting.SETTINGS[-1], "by parameter", 62, 50)
    assert facts["epsilon"] == pytest.approx(7.3e6, rel=0.02)
    assert facts["type_two"] == 0
    assert facts["advantage"] == pytest.approx(1)
    assert facts["no_privacy"]


def test_from_the_command_line(tmp_path: Path, capsys) -> None:
    table, picture = tmp_path / "t.json", tmp_path / "t.png"
    asked = ["accounting", "--networks", "convnet", "--epochs", "1"]
    rows = runner.main(PAPER, [*asked, "--out", str(table), "--plot", str(picture)])
    assert [r["blocks"] for r in rows] == [9, 18]
    written = json.loads(table.read_text())["rows"]
    assert [r["epsilon"] for r in written] == [r["epsilon"] for r in rows]
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "this is no privacy" in printed
    assert "not a guarantee" in printed
