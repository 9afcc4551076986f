"""Losses of one record; each says its Lipschitz constant where it has one."""

from tacit.losses.cross_entropy import CrossEntropy

__all__ = ["CrossEntropy"]
