"""Procedural anatomy: images, labels and true correspondences without patient data."""

from __future__ import annotations

from carlreg.synthesis.pairs import Pairs, random_anatomy
from carlreg.synthesis.patients import Patient, Scan, correspondence, patient
from carlreg.synthesis.torso import LABELS, PHASES

__all__ = ["LABELS", "PHASES", "Pairs", "Patient", "Scan", "correspondence", "patient", "random_anatomy"]
