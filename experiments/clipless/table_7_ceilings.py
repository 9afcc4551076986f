"""Beside Table 7: the AUROC that models reach on a set *without* privacy.

Each model is fitted to four fifths of the training records of one split and scored on the other
fifth, over repeated five-fold splits; no record that is held out for the table's own split 0 is
read. What these reach on average, a private model of the same kind does not pass.

    python experiments/clipless/table_7_ceilings.py --set yeast --repeats 3 --out ceilings.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import RepeatedStratifiedKFold, cross_val_score
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from sklearn.svm import SVC
from table_7 import KERNELS, SETS, load
from table_7_models import PublicKernel, Setting

from tacit.report.run_folder import source


def kernel_features(name: str, width: int) -> FunctionTransformer:
    """The table's own features at the middle of its space, all values of equal relevance."""
    space = KERNELS[name]
    bandwidth = statistics.geometric_mean(space.bandwidth)
    setting = Setting(
        standardise=False,
        features=space.features,
        bandwidth=bandwidth,
        hidden=0,
        rate=1.0,
        steps=1,
        scale=1.0,
        clip=1.0,
        learning_rate=1.0,
        limit=space.limit,
        relevance=(1.0,) * width,
    )
    kernel = PublicKernel(width, setting)
    return FunctionTransformer(lambda rows: kernel(torch.as_tensor(rows)).numpy())


def models(name: str, width: int) -> dict[str, ClassifierMixin]:
    return {
        "logistic regression": make_pipeline(StandardScaler(), LogisticRegression()),
        "logistic regression on the table's features": make_pipeline(
            kernel_features(name, width), LogisticRegression(C=30.0, max_iter=1000)
        ),
        "RBF support vectors": make_pipeline(StandardScaler(), SVC()),
        "25 nearest neighbours": make_pipeline(StandardScaler(), KNeighborsClassifier(25)),
        "boosted trees": HistGradientBoostingClassifier(learning_rate=0.05, random_state=0),
        "random forest": RandomForestClassifier(300, min_samples_leaf=3, random_state=0),
    }


def ceilings(name: str, repeats: int) -> list[dict]:
    x, y, _, _ = load(name, seed=0)
    folds = RepeatedStratifiedKFold(n_splits=5, n_repeats=repeats, random_state=0)
    rows = []
    for label, model in models(name, x.shape[1]).items():
        found = cross_val_score(model, x.numpy(), y.numpy(), cv=folds, scoring="roc_auc")
        row = {
            "set": name,
            "model": label,
            "mean": 100 * np.mean(found),
            "std": 100 * np.std(found),
        }
        print(f"{label:45} {row['mean']:6.2f} ± {row['std']:.2f}", flush=True)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set", choices=[name for name in SETS if name in KERNELS], required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = ceilings(options.set, options.repeats)
    if options.out:
        options.out.write_text(json.dumps({"rows": rows, "source": source()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
