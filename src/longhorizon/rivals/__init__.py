"""Every rival of the paper, on equal terms: `compare`.

driver → registry → blackbox · fixed · packaged · methods → arena → training · ledger · budget · space
"""

from longhorizon.rivals.driver import Comparison, compare

__all__ = ["Comparison", "compare"]
