"""Which options of `tacit train` go with which query, and with each other."""

from __future__ import annotations

from collections.abc import Mapping

from tacit.cli.networks import QueryName

_CLIPPING = (QueryName.CLIP, QueryName.BATCH_CLIP)
_SCOPE: dict[str, tuple[QueryName, ...]] = {
    "mini_set_size": (QueryName.BATCH_CLIP,),
    "mini_sets": (QueryName.BATCH_CLIP,),
    "mini_set_rate": (QueryName.BATCH_CLIP,),
    "local": (QueryName.BATCH_CLIP,),
    "local_lr": (QueryName.BATCH_CLIP,),
    "local_batch": (QueryName.BATCH_CLIP,),
    "statistics": (QueryName.BATCH_CLIP,),
    "statistics_noise": (QueryName.BATCH_CLIP,),
    "max_norm": _CLIPPING,
    "rule": _CLIPPING,
    "blocks": _CLIPPING,
    "gradient_clip": (QueryName.CLIPLESS,),
    "layerwise": _CLIPPING,
    "groups": _CLIPPING,
    "master_decay": _CLIPPING,
    "public_share": _CLIPPING,
    "sparsify": _CLIPPING,
}


def check_scope(given: Mapping[str, object], query: QueryName) -> None:
    """Raise if an option was given that this query would not look at."""
    for name, queries in _SCOPE.items():
        value = given[name]
        if value in (None, "none") or query in queries:
            continue
        option = "--" + name.replace("_", "-")
        others = " or ".join(f"--query {other.value}" for other in queries)
        raise ValueError(
            f"{option} is {value}, and --query is {query.value}; it goes with {others}: give that, "
            f"or leave {option} out"
        )
    if query is QueryName.BATCH_CLIP and given["sampling"] is not None:
        raise ValueError(
            f"--sampling is {given['sampling']}, and --query batch-clip draws mini-sets, which are "
            "fixed by record id; say how with --mini-sets or --mini-set-rate, and leave --sampling "
            "out"
        )
    if given["steps"] is not None and given["epochs"] is not None:
        raise ValueError(
            f"--steps is {given['steps']} and --epochs is {given['epochs']:g}; the one follows "
            "from the other: give one of them"
        )
    if given["data"] is not None and given["dataset"] is not None:
        raise ValueError(
            f"--data is {given['data']} and --dataset is {given['dataset']}; a run has one of "
            "them: leave the other out"
        )
    if given["data"] is None and given["public_size"] is not None:
        raise ValueError(
            f"--public-size is {given['public_size']}, and the size of a named dataset is known; "
            "it goes with --data: give that, or leave --public-size out"
        )
    if given["optimizer"] == "adam" and given["momentum"] is not None:
        raise ValueError(
            f"--momentum is {given['momentum']:g}, and --optimizer adam does not look at it; give "
            "--optimizer sgd, or leave --momentum out"
        )
