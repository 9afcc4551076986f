"""The settings of `tacit search`: its own options, beside those of `tacit train` that it shares."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tacit.cli.schema import ONE_OR_MORE, POSITIVE, SHARE, Range, Rule, option, section
from tacit.cli.settings import (
    BatchClippingSettings,
    CliplessSettings,
    ClippingSettings,
    DataSettings,
    ModelSettings,
    PrivacySettings,
    QuerySettings,
    TrainingSettings,
)

SEARCHED = ("lr", "max-norm", "gradient-clip", "temperature")
_TRIALS = Rule("method", ("trials",))
_SELECT = Rule("method", ("select",))
_SIMULATE = Rule("method", ("simulate",))


@section("search", "Search")
class SearchSection:
    method: Literal["trials", "select", "simulate"] = option(
        "trials: cheap noisy trials, chosen adaptively, then one full run. select: the best of a "
        "secret random number of full runs. simulate: trials on synthetic records or on those of "
        "--simulate-on, which is free, then one full run.",
        "trials",
        common=True,
    )
    trials: int = option(
        "Number of trials; for select, the expected number of runs.",
        50,
        range=ONE_OR_MORE,
        common=True,
    )
    over: tuple[str, ...] = option(
        f"Settings to search: {', '.join(SEARCHED)}.",
        ("lr",),
        form="names such as lr,max-norm",
        common=True,
    )
    within: float = option(
        "Search each setting from its usual value divided by this to that value times this.",
        10.0,
        range=Range("a finite number above 1", lambda v: 1 < v < float("inf")),
    )
    overhead: float = option(
        "Epsilon of everything over that of the final run alone.",
        1.3,
        range=Range("a number from 1.01 to 100", lambda v: 1.01 <= v <= 100),
        goes_with=_TRIALS,
    )
    trial_steps: int | None = option(
        "Full batches in a trial.",
        usual="10 to 60, such that learning rates carry over",
        range=ONE_OR_MORE,
        goes_with=_TRIALS,
    )
    worker: bool = option(
        "Run trials of the search in --out until none is left, for another process to finish it.",
        False,
        goes_with=_TRIALS,
    )
    storage: str | None = option(
        "Optuna's storage for the trials, such as a database that several machines reach.",
        usual="study.sqlite3 in --out",
        goes_with=_TRIALS,
    )
    shape: float = option(
        "Law of the secret number of runs, a negative binomial one: 0 for the logarithmic, 1 for "
        "the geometric. Smaller costs less and varies more.",
        0.0,
        range=Range("a number above -1 and at most 100", lambda v: -1 < v <= 100),
        goes_with=_SELECT,
    )
    simulate_on: str | None = option(
        "Named dataset of public records to search on.",
        usual="synthetic records",
        goes_with=_SIMULATE,
    )
    score: Literal["right-answers", "bounded-loss"] = option(
        "What is summed over held-out training records: right answers, or one minus the loss over "
        "--most-loss, cut at 0. The noise in it is charged.",
        "right-answers",
    )
    most_loss: float | None = option(
        "Loss that counts as 0 for bounded-loss.",
        usual="twice that of guessing among the classes",
        range=POSITIVE,
        goes_with=Rule("score", ("bounded-loss",)),
    )
    score_share: float | None = option(
        "Share of the training records that trials are scored on. The final run trains on all, "
        "except for select.",
        usual="0.1 to 0.3, by the noise",
        range=SHARE,
    )


@section("output", "Output")
class SearchOutputSettings:
    out: Path | None = option(
        "Folder of the search: study, ledger, and the final run. A search there is continued.",
        usual="runs/search-NAME-TIME",
        common=True,
    )
    ledger: Path | None = option("Ledger to charge.", usual="ledger.sqlite in --out")
    json: bool = option("Print one JSON object and nothing else.", False)
    quiet: bool = option("Show no progress.", False, short="-q")


@dataclass(frozen=True)
class SearchSettings(
    DataSettings,
    PrivacySettings,
    ModelSettings,
    QuerySettings,
    ClippingSettings,
    CliplessSettings,
    BatchClippingSettings,
    TrainingSettings,
    SearchSection,
    SearchOutputSettings,
):
    """Everything that `tacit search` can be told."""
