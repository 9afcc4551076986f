"""The public share of a run's records: split off first, and only where it is used."""

from __future__ import annotations

import typer

from tacit.data.splits import split_public
from tacit.records import Records

USUAL_SHARE = 0.1
SHARE = typer.Option(
    None,
    "--public-share",
    help="Share of the records given up as public, for --layerwise, --groups and --statistics "
    f"public; {USUAL_SHARE} by default.",
)
CONSTANTS_NOTE = "constants or groups of the clipped blocks are estimated on the public records"


def public_and_private(
    records: Records, share: float | None, needed: bool
) -> tuple[Records | None, Records]:
    """(public, private), or (None, all of them) where nothing in the run looks at public ones."""
    if not needed:
        if share is not None:
            raise ValueError(
                f"--public-share is {share:g}, and nothing in this run uses public records; leave "
                "it out, or give --layerwise, --groups or --statistics public"
            )
        return None, records
    return split_public(records, USUAL_SHARE if share is None else share)
