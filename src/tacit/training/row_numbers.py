"""Row numbers in the place of record ids: what ε is for then."""

from __future__ import annotations

from tacit.budget import Relation
from tacit.sampling.sampler import Sampler
from tacit.sampling.schemes import MiniSets

ROW_NUMBERS = (
    "records have no ids but their row numbers, by which mini-sets are formed: epsilon is for a "
    "record that is missing while all others keep their numbers, and not for a table with a row "
    "fewer; give record_ids, or a budget for replace-one"
)


def by_row_number(sampler: Sampler, relation: Relation) -> bool:
    """Whether a row fewer would put all later ones into other mini-sets."""
    by_id = isinstance(sampler.scheme, MiniSets)
    return by_id and sampler.records.row_numbered and relation is Relation.ADD_OR_REMOVE_ONE
