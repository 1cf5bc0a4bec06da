"""How much the kit compared in this process; the pytest plugin prints it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Tally:
    """Comparisons and the elements in them.

    >>> counted = Tally()
    >>> counted.add(12)
    >>> (counted.cases, counted.elements)
    (1, 12)
    """

    cases: int = 0
    elements: int = 0

    def add(self, elements: int) -> None:
        """Count one comparison of ``elements`` elements."""
        self.cases += 1
        self.elements += elements


TALLY = Tally()
"""Every ``assert_bits_equal`` and ``assert_within_bound`` of this process."""
