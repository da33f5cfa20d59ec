"""How states are stored: which arrays a format has, and which format some arrays are of.

A format is the name of a state's dtype, or of a float16 state with a read copy: "float16+fp8",
"float16+nvfp4".
"""

from __future__ import annotations

from typing import Any

from .arrays import View, dtype_name
from .checks import Letters, check_dtype
from .keys import COPY_DTYPES, SCALED_FORMATS, SLAB, STATE_DTYPES, STATE_FORMATS, bytes_of_slab


def format_name(state_dtype: Any, name: str) -> str:
    """The format that a user names: of NumPy, torch or JAX dtypes, or a string."""
    if isinstance(state_dtype, str) and state_dtype in COPY_DTYPES:
        return state_dtype
    found = dtype_name(state_dtype, name)
    if found not in STATE_DTYPES:
        raise TypeError(f"{name}: expected one of {', '.join(STATE_FORMATS)}, got {found}")
    return found


def arrays_of(state_format: str) -> tuple[str, str | None]:
    """The dtypes of a format's state and of its copy, if it has one."""
    copy = COPY_DTYPES.get(state_format)
    return (state_format, None) if copy is None else ("float16", copy)


def format_of(state: View, copy: View | None) -> str:
    """The format of checked arrays."""
    if copy is None:
        return state.dtype
    return next(name for name, dtype in COPY_DTYPES.items() if dtype == copy.dtype)


def copy_shape(state_format: str, head_dim: int, dstate: int) -> tuple[int, int]:
    """Of the copy of one head."""
    if state_format == "float16+fp8":
        return head_dim, dstate
    return head_dim // SLAB, bytes_of_slab(state_format, dstate)


def check_state(state: View, copy: View | None, scale: View | None, letters: Letters) -> str:
    """Binds the letters of a state and what belongs to it; returns the format.

    Codes have decode scales (num_slots, nheads, head_dim) float32, other states none.
    """
    check_dtype(state, STATE_DTYPES)
    letters.bind(state, ("num_slots", "nheads", "head_dim", "dstate"))
    if copy is not None:
        check_dtype(state, ("float16",), f" beside {copy.name}")
        check_dtype(copy, tuple(COPY_DTYPES.values()))
    found = format_of(state, copy)
    if copy is not None:
        expected = (*state.shape[:2], *copy_shape(found, *state.shape[2:]))
        if copy.shape != expected:
            raise ValueError(
                f"{copy.name}: expected {expected} beside {state.name} of {state.shape}, "
                f"got {copy.shape}"
            )
    if (scale is not None) != (found in SCALED_FORMATS):
        wanted = "None" if scale is not None else "an array of float32 scales"
        got = "None" if scale is None else "an array"
        name = state.name.replace("state", "state_scale", 1)
        raise ValueError(f"{name}: expected {wanted} with states of {found}, got {got}")
    if scale is not None:
        check_dtype(scale, ("float32",))
        letters.bind(scale, ("num_slots", "nheads", "head_dim"))
    return found
