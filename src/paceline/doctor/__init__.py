"""`paceline doctor`: checks what this machine can run, and whether it has what the settings of a run require."""

from paceline.doctor.finding import DEGRADED, MISSING, OK, Finding, as_json, is_ok
from paceline.doctor.machine import check_machine
from paceline.doctor.run import check_run

__all__ = ["DEGRADED", "MISSING", "OK", "Finding", "as_json", "check_machine", "check_run", "is_ok"]
