"""The error of everything that is not the caller's argument: compiler, driver, device."""

from __future__ import annotations


class ReplaySSMError(RuntimeError):
    """A kernel could not be compiled, loaded or launched."""
