"""The probe: finds out how any matrix product accumulates, and says so only with evidence."""

from fp8ref.probing.report import Finding, ProbeReport
from fp8ref.probing.run import probe
from fp8ref.probing.subject import ProbeError

__all__ = ["Finding", "ProbeError", "ProbeReport", "probe"]
