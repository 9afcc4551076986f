"""Robustness certificates of Lipschitz networks: radii within which a decision cannot change."""

from tacit.certificates.accuracy import CertifiedAccuracy, certified_accuracy
from tacit.certificates.certifier import certified_radius

__all__ = [
    "CertifiedAccuracy",
    "certified_accuracy",
    "certified_radius",
]
