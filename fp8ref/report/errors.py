"""The one exception that the command line turns into a one-line message."""

from __future__ import annotations


class ReportError(Exception):
    """The report cannot be made from what the user gave; the message names it and the fix.

    >>> str(ReportError("--tokens: got 1; give 8 or more"))
    '--tokens: got 1; give 8 or more'
    """
