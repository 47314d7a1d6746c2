"""`paceline doctor`: what this machine can run, and whether a run's settings will find here what they ask for."""

from paceline.doctor.finding import DEGRADED, MISSING, OK, Finding, as_json, healthy
from paceline.doctor.machine import examine
from paceline.doctor.run import examine_run

__all__ = ["DEGRADED", "MISSING", "OK", "Finding", "as_json", "examine", "examine_run", "healthy"]
