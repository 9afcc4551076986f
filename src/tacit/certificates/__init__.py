"""Robustness certificates of Lipschitz networks: radii within which a decision cannot change.

`certified_radius` gives one L2 radius per record, and `certified_accuracy` the share of held-out
records that are classified correctly and stay so within a radius.
"""

from tacit.certificates.accuracy import CertifiedAccuracy, certified_accuracy
from tacit.certificates.certifier import certified_radius

__all__ = [
    "CertifiedAccuracy",
    "certified_accuracy",
    "certified_radius",
]
