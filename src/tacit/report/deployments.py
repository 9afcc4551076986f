"""The fields of the Differential Privacy Deployments Registry for a privacy statement.

The registry (OpenDP, deployments-registry-data) collects what real deployments chose, one YAML file
each. What a statement knows is filled in here; what only its publisher knows is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tacit.errors import shown
from tacit.report.privacy_statement import PrivacyStatement
from tacit.report.statement_words import FLOATING_POINT, mechanism_of, paragraphs

_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


def deployments_registry_entry(
    statement: PrivacyStatement,
    *,
    name: str,
    data_curators: Sequence[Mapping[str, str]],
    description: str,
    intended_use: str,
    region: str,
    sector: str,
    publication_date: str,
    data_domain: str,
    actors: str,
    justification: str,
    registry_authors: Sequence[str],
) -> dict[str, Any]:
    """An entry for the Differential Privacy Deployments Registry, as plain values for YAML.

    Args:
        data_curators: who holds the records: {"data_curator_name": …, "data_curator_type": …} each.
        sector: such as "Technology" or "Healthcare".
        publication_date: of the model, as YYYY-MM-DD.
        data_domain: which datasets the model might have been trained on.
        actors: who sees what, and who is trusted with it.
        justification: why unit, ε, δ and method are what they are.

    The layout is that of the registry's template at the end of 2025. It has changed often: compare
    it before you hand an entry in. Raises ValueError for a field that is empty.

        entry = tacit.report.deployments_registry_entry(statement, name="Digits", …)
    """
    given: dict[str, Any] = {
        "name": name,
        "data_curators": data_curators,
        "description": description,
        "intended_use": intended_use,
        "region": region,
        "sector": sector,
        "publication_date": publication_date,
        "data_domain": data_domain,
        "actors": actors,
        "justification": justification,
        "registry_authors": registry_authors,
    }
    empty = [key for key, value in given.items() if not value]
    if empty:
        raise ValueError(f"{empty[0]} is {shown(given[empty[0]])}; say it in a sentence")
    if not _DATE.fullmatch(publication_date):
        raise ValueError(f"publication_date is {publication_date!r}; give it as YYYY-MM-DD")
    content = statement.content
    words = {heading: " ".join(found) for heading, found in paragraphs(content)}
    unprotected = [row["what"] for row in content["released"] if not row["covered"]]
    return {
        "url_slug": re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-"),
        "deployment": {
            "basic": {
                "name": name,
                "data_curators": [dict(curator) for curator in data_curators],
                "description": description,
                "intended_use": intended_use,
                "data_product_type": "Machine learning model",
                "data_product_region": region,
                "data_product_sector": sector,
                "publication_date": publication_date,
            },
            "dp_variant": {
                "variant_name": "Approximate DP",
                "data_domain": data_domain,
                "unprotected_quantities": "; ".join([*unprotected, *content["public"]]),
            },
            "privacy_loss": {
                "privacy_unit": content["unit"]["name"],
                "privacy_unit_details": f"{words['What is protected']} {words['Against whom']}",
                "number_of_privacy_units": 1,
                "privacy_parameters": {"epsilon": statement.epsilon, "delta": statement.delta},
                "privacy_parameters_details": " ".join(
                    text for text in (content["text"], words.get("What a test can learn")) if text
                ),
            },
            "deployment_model": {
                "model_name": "Central",
                "trust_assumptions": "Whoever holds the records and trains is trusted with them.",
                "actors": actors,
                "release_type": "One-shot",
                "data_source_type": "Static",
                "access_type": "Non-interactive",
            },
            "implementation": {
                "preprocessing_and_hyperparameter_tuning": words["Searched and charged"],
                "mechanisms": f"{mechanism_of(content)} {FLOATING_POINT} {_software_of(content)}",
                "composition": words["Accounting"],
                "post_processing": "Optimiser, schedule and averages of the released gradients.",
                "justification": justification,
                "additional_information": words.get("The ledger", "No ledger is named."),
            },
            "administrative": {"status": "Draft", "registry_authors": list(registry_authors)},
        },
    }


def _software_of(content: Mapping[str, Any]) -> str:
    software = content["software"]
    commit = "" if software["commit"] is None else f", commit {software['commit']}"
    return f"Tacit {software['tacit']}{commit}."
