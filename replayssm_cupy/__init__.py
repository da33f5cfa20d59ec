"""ReplaySSM: decode Mamba-2 layers fast, from any array library, with nothing to build."""

from .errors import ReplaySSMError
from .layer_stack import LayerStack
from .ops import checkpointing_ssu, selective_state_update
from .prefix import replayssm_materialize
from .prefix_plan import plan_materialize
from .scratch import allocate_scratch
from .slots import advance_ring, load_state, reset_slots, warm_up
from .vllm_cache import initialize_replayssm_state, selective_state_update_replayssm

__version__ = "0.1.0"

__all__ = [
    "LayerStack",
    "ReplaySSMError",
    "advance_ring",
    "allocate_scratch",
    "checkpointing_ssu",
    "initialize_replayssm_state",
    "load_state",
    "plan_materialize",
    "replayssm_materialize",
    "reset_slots",
    "selective_state_update",
    "selective_state_update_replayssm",
    "warm_up",
]
