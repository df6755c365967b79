"""Step caches: a row whose evaluation is much like an earlier one reuses what the blocks added then, and the blocks run
for the other rows only.

mechanism.py has the one mechanism: it runs the blocks of those rows that have to. policies.py says who decides and by
what, compare.py measures that, memory.py keeps and extrapolates.
"""

from __future__ import annotations

from omni_grpc.features.step_cache.mechanism import StepCache, apply

__all__ = ["StepCache", "apply"]
