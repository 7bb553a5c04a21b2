"""`DriftAware` with other constants than those of the authors' code."""

from typing import Any

from tiered.decoding.rules.drift_aware import DriftAware


def drift_aware(
    *, drift_window: int = 5, drift_slope: float = 10.0, drift_ceiling: float = 2.0, **options: Any
) -> DriftAware:
    """A rule with these constants and options."""
    constants = {"drift_window": drift_window, "drift_slope": drift_slope, "drift_ceiling": drift_ceiling}
    return type("Variant", (DriftAware,), {**constants, "__slots__": ()})(**options)


# Commits early on models that were never trained.
EAGER = drift_aware(confidence_threshold=0.8, early_threshold=0.2, drift_slope=0.1, drift_ceiling=9.0)
