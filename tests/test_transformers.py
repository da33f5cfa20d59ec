"""``ReplayMamba2Cache`` in Hugging Face transformers: the tokens of the model without it."""

from __future__ import annotations

import copy
import inspect
from functools import cache
from typing import Any

import pytest

from replayssm_cupy import plan

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
FORWARD = getattr(getattr(transformers, "Mamba2ForCausalLM", None), "forward", print)
if "cache" not in inspect.signature(FORWARD).parameters:
    pytest.skip(f"needs transformers 5.24, not {transformers.__version__}", allow_module_level=True)
from transformers.cache_utils import DynamicCache  # noqa: E402

from replayssm_cupy.torch import ReplayMamba2Cache  # noqa: E402  # imports torch

transformers.logging.set_verbosity_error()
torch.set_num_threads(1)  # more wait for each other longer than such small models compute

MAMBA = {"mamba_n_heads": 2, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_n_groups": 1,
         "mamba_expand": 2, "mamba_chunk_size": 8}  # fmt: skip
ATTENTION = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
             "num_key_value_heads": 2}  # fmt: skip
MIXED = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
FAMILIES = {
    "Mamba2": {"hidden_size": 64, "num_hidden_layers": 3, "num_heads": 2, "head_dim": 64,
               "state_size": 64, "n_groups": 1, "chunk_size": 8},
    "Bamba": {**ATTENTION, **MAMBA, "num_hidden_layers": 4, "attn_layer_indices": [2]},
    "NemotronH": {
        **ATTENTION, "layers_block_type": [*MIXED[:3], "mlp", "moe"], "head_dim": 16,
        "mamba_num_heads": 2, "mamba_head_dim": 64, "ssm_state_size": 64, "n_groups": 1,
        "chunk_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32,
    },
    "GraniteMoeHybrid": {
        **ATTENTION, **MAMBA, "num_hidden_layers": 4, "layer_types": MIXED,
        "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 48,
    },
    "Zamba2": {
        **ATTENTION, "num_key_value_heads": 4, "num_hidden_layers": 4, "num_mem_blocks": 1,
        "layers_block_type": ["linear_attention", "hybrid"] * 2, "n_mamba_heads": 2,
        "mamba_headdim": 64, "mamba_d_state": 64, "mamba_ngroups": 1, "chunk_size": 8,
        "adapter_rank": 8,
    },
    "FalconH1": {**ATTENTION, **MAMBA, "num_hidden_layers": 3, "head_dim": 16, "mamba_d_ssm": 128},
}  # fmt: skip
PRESENT = [name for name in FAMILIES if hasattr(transformers, f"{name}ForCausalLM")]


@cache
def tiny(family: str, vocab: int = 97, device: str = "cpu", dtype: str = "float32") -> Any:
    """A random model whose next tokens are far from a tie."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(vocab_size=vocab, **FAMILIES[family])
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "conv" not in name:
                weight.mul_(6)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.to(device=device, dtype=getattr(torch, dtype))


def prompt(batch: int = 1, length: int = 12, vocab: int = 97, device: str = "cpu") -> Any:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(1, vocab, (batch, length), generator=generator).to(device)


def small(model: Any, **options: Any) -> ReplayMamba2Cache:
    """A cache that folds often."""
    return ReplayMamba2Cache(model, **{"max_window": 5, "npredicted": 3} | options)


def greedy(model: Any, ids: Any, tokens: int = 24, **options: Any) -> Any:
    return model.generate(ids, max_new_tokens=tokens, do_sample=False, **options)


class Recording(ReplayMamba2Cache):
    """Notes how many tokens each call took back."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.removed: list[int] = []

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self.removed.append(-tokens_to_remove)


# --- generate ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", PRESENT)
def test_greedy(family):
    """The rings wrap, and are folded four times."""
    model, ids = tiny(family), prompt()
    expected = greedy(model, ids, cache=DynamicCache(config=model.config))
    assert torch.equal(greedy(model, ids, cache=small(model)), expected)
    assert torch.equal(
        greedy(model, ids, 5), expected[:, :17]
    )  # without the cache all is as it was


@pytest.mark.parametrize("family", PRESENT)
def test_batch_with_padding_on_the_left(family):
    model, ids = tiny(family), prompt(3)
    mask = torch.ones_like(ids)
    mask[1, :5] = mask[2, :2] = 0
    expected = greedy(model, ids, 12, attention_mask=mask)
    cache = small(model, npredicted=1)
    assert torch.equal(greedy(model, ids, 12, attention_mask=mask, cache=cache), expected)
    assert cache.stack.num_slots == 3


@pytest.mark.parametrize(
    ("family", "length"), [*((name, 12) for name in PRESENT), ("Mamba2", 1), ("Bamba", 3)]
)
def test_prompt_lookup(family, length):
    """Drafts that are partly right, from a text that repeats itself: few tokens to choose from."""
    model = tiny(family, vocab=3)
    ids = prompt(length=length, vocab=3)
    expected = greedy(model, ids, 30)
    cache = Recording(model)
    drafted = greedy(model, ids, 30, cache=cache, prompt_lookup_num_tokens=5)
    assert torch.equal(drafted, expected)
    assert len(cache.removed) < 30, "no draft was right"
    assert sum(cache.removed), "every draft was right"


def test_assisted_by_another_model():
    """Which has a cache of its own that can roll back: it is a Llama."""
    model, ids = tiny("Mamba2", vocab=11), prompt(vocab=11)
    config = transformers.LlamaConfig(
        vocab_size=11, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    assistant = transformers.LlamaForCausalLM(config).eval()
    cache = Recording(model, npredicted=8)
    drafted = greedy(model, ids, 16, cache=cache, assistant_model=assistant)
    assert torch.equal(drafted, greedy(model, ids, 16))
    assert sum(cache.removed)


@pytest.mark.parametrize("family", PRESENT)
def test_beams(family):
    """A beam search reorders the rows of the cache at every step."""
    model, ids = tiny(family), prompt(2)
    expected = greedy(model, ids, 10, num_beams=3)
    assert torch.equal(greedy(model, ids, 10, num_beams=3, cache=small(model)), expected)


@pytest.mark.parametrize(("length", "draft"), [(1, 0), (1, 2), (7, 2)])
def test_limits_of_dt(length, draft):
    """transformers has them at a prompt and not at later tokens."""
    model = copy.deepcopy(tiny("NemotronH", vocab=3))
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (3.0, 4.0)
    ids = prompt(length=length, vocab=3)
    cache = small(model)
    drafted = greedy(model, ids, 20, cache=cache, prompt_lookup_num_tokens=draft or None)
    assert torch.equal(drafted, greedy(model, ids, 20))
    longer = torch.cat([drafted, drafted[:, -6:]], dim=1)  # more than a step takes
    with torch.no_grad():
        logits = model(longer[:, drafted.shape[1] - 1 :], cache=cache).logits
    theirs = DynamicCache(config=model.config)
    greedy(model, ids, 20, cache=theirs)
    with torch.no_grad():
        right = model(longer[:, drafted.shape[1] - 1 :], cache=theirs).logits
    assert torch.allclose(logits[:, -1], right[:, -1], atol=1e-3, rtol=1e-3)


def test_second_turn():
    """More tokens than a step takes, behind tokens that wait in the rings; then a reset."""
    model, ids = tiny("Bamba"), prompt()
    mine, theirs = ReplayMamba2Cache(model, npredicted=4), DynamicCache(config=model.config)
    first = greedy(model, ids, 7, cache=mine)
    assert torch.equal(first, greedy(model, ids, 7, cache=theirs))
    longer = torch.cat([first, prompt(length=9)], dim=1)
    second = greedy(model, longer, 8, cache=mine)
    assert torch.equal(second, greedy(model, longer, 8, cache=theirs))


def test_reset():
    model, ids = tiny("Mamba2"), prompt()
    cache = small(model)
    expected = greedy(model, ids, 8, cache=cache)
    assert cache.stack.prev_num_accepted_tokens.any()
    cache.reset()
    assert torch.equal(greedy(model, ids, 8, cache=cache), expected)


@pytest.mark.parametrize("family", ["Mamba2", "Zamba2"])
def test_copies_of_a_prefix(family):
    """copy.deepcopy: the copies go on by themselves, from tokens that wait in the rings too."""
    model, ids = tiny(family), prompt()
    cache = ReplayMamba2Cache(model)
    with torch.no_grad():
        model(ids[:, :8], cache=cache)
        model(ids[:, 8:11], cache=cache)
        twin = copy.deepcopy(cache)
        logits = [
            model(torch.tensor([[token]]), cache=each).logits
            for each, token in ((cache, 3), (twin, 4), (cache, 5), (twin, 5))
        ]
        for token, later in ((3, logits[2]), (4, logits[3])):
            line = torch.cat([ids[:, :11], torch.tensor([[token, 5]])], dim=1)
            assert torch.allclose(model(line).logits[:, -1], later[:, -1], atol=1e-3, rtol=1e-3)


# --- Windows -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", PRESENT)
def test_windows_equal_single_tokens(family):
    """Windows of which some tokens are taken back, against one token a call."""
    model, ids = tiny(family), prompt(2, 32)
    mine = ReplayMamba2Cache(model, npredicted=6, max_window=8)
    one_by_one = DynamicCache(config=model.config)
    mine.activate_past_recording()
    wrong = prompt(2, 6).flip(0)

    def logits(tokens: Any, first: int, cache: Any) -> Any:
        positions = torch.arange(first, first + tokens.shape[1]).expand(2, -1)
        with torch.no_grad():
            return model(tokens, cache=cache, position_ids=positions).logits

    logits(ids[:, :10], 0, one_by_one)
    logits(torch.cat([ids[:, :10], wrong[:, :2]], dim=1), 0, mine)
    mine.crop(-2)
    done = 10
    for kept, drafts in ((1, 5), (6, 0), (3, 2), (2, 0), (5, 1), (1, 0), (4, 2)):
        window = torch.cat([ids[:, done : done + kept], wrong[:, :drafts]], dim=1)
        y = logits(window, done, mine)[:, :kept]
        mine.crop(-drafts)
        tokens = range(done, done + kept)
        right = torch.cat([logits(ids[:, i, None], i, one_by_one) for i in tokens], dim=1)
        assert torch.allclose(y, right, atol=1e-3, rtol=1e-3), (kept, drafts)
        done += kept


@pytest.mark.parametrize("state_dtype", ["bfloat16", "float8_e4m3fn", "int8"])
def test_other_states(state_dtype):
    """A second turn reads 8-bit states with their scales."""
    model, ids = tiny("Mamba2"), prompt()
    cache = ReplayMamba2Cache(
        model, state_dtype=state_dtype, stochastic_rounding=True, npredicted=2
    )
    exact = ReplayMamba2Cache(model, npredicted=2)
    with torch.no_grad():
        for tokens in (ids[:, :6], ids[:, 6:7], ids[:, 7:]):
            logits, right = (model(tokens, cache=each).logits for each in (cache, exact))
    assert (logits - right).norm() < 0.1 * right.norm()
    assert not torch.equal(logits, right)


@pytest.mark.parametrize("family", PRESENT)
def test_kernels_take_what_the_model_gives(family, monkeypatch):
    """Strides and alignment of a bfloat16 model: the kernels of tests/host and the reference."""
    from host.launcher import HostLauncher

    model, ids = tiny(family, 97, dtype="bfloat16"), prompt(2, 20)

    def run() -> Any:
        cache, logits = small(model, npredicted=4), []
        with torch.no_grad():
            for window in ids.split([12, 1, 4, 1, 2], 1):
                logits.append(model(window, cache=cache).logits)
        return torch.cat(logits, 1).float()

    expected = run()
    monkeypatch.setitem(plan.launchers, "cpu", HostLauncher())
    assert (run() - expected).norm() < 0.02 * expected.norm()


# --- Errors --------------------------------------------------------------------------------------


def test_models_of_other_families():
    with pytest.raises(TypeError, match=r"^model: expected a Mamba-2 model .*, got Linear$"):
        ReplayMamba2Cache(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"^model: expected a Mamba-2 model .*, got str$"):
        ReplayMamba2Cache("mamba2")


def test_models_of_other_versions(monkeypatch):
    """A cache that no call takes would leave the model without one, silently."""
    model = tiny("Mamba2")
    monkeypatch.setattr(type(model), "forward", lambda self, input_ids, **others: None)
    got = f"got Mamba2ForCausalLM of transformers {transformers.__version__}"
    message = rf"^model: expected one whose forward takes cache, of transformers 5.24, {got}$"
    with pytest.raises(TypeError, match=message):
        ReplayMamba2Cache(model)


def test_limits_of_the_window():
    model = tiny("Mamba2")
    with pytest.raises(ValueError, match=r"^npredicted: expected 1 to 16, got 17$"):
        ReplayMamba2Cache(model, npredicted=17)
    with pytest.raises(ValueError, match=r"^max_window: expected 1 to 16, got 0$"):
        ReplayMamba2Cache(model, max_window=0)
    with pytest.raises(ValueError, match=r"^npredicted: expected 1 to max_window = 4, got 5$"):
        ReplayMamba2Cache(model, max_window=4, npredicted=5)


def test_tokens_that_cannot_be_taken_back():
    model, ids = tiny("Mamba2"), prompt()
    cache = ReplayMamba2Cache(model, npredicted=4)
    cache.activate_past_recording()
    with torch.no_grad():
        model(ids, cache=cache)
    message = r"^tokens_to_remove: expected at most the 4 last tokens of the latest call .*, got 5$"
    with pytest.raises(ValueError, match=message):
        cache.crop(-5)
    cache.crop(-3)
    with pytest.raises(ValueError, match=r"^tokens_to_remove: expected at most the 1 last .* 2$"):
        cache.crop(-2)


def test_a_refused_crop_changes_nothing():
    """transformers refuses it where the cache was not told to record."""
    model, ids = tiny("Mamba2"), prompt()
    mine, right = (ReplayMamba2Cache(model) for _ in range(2))
    with torch.no_grad():
        for cache in (mine, right):
            model(ids, cache=cache)
            model(ids[:, :1], cache=cache)
        with pytest.raises(RuntimeError, match="activate_past_recording"):
            mine.crop(-1)
        logits = [model(ids[:, 1:2], cache=cache).logits for cache in (mine, right)]
    assert torch.equal(*logits)


def test_another_batch():
    model = tiny("Mamba2")
    cache = ReplayMamba2Cache(model)
    greedy(model, prompt(2), 3, cache=cache)
    cache.reset()
    with pytest.raises(ValueError, match=r"^cache: expected batch 2 as in the first call, got 1$"):
        model(prompt(1), cache=cache)


def test_default_caches_stay_without_assisted_generation():
    """transformers' own message; never wrong tokens."""
    model = tiny("Mamba2")
    ReplayMamba2Cache(model)
    with pytest.raises(ValueError, match="cache that can be cropped"):
        greedy(model, prompt(), prompt_lookup_num_tokens=3)


# --- 16 bits, and CUDA ----------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family", PRESENT)
def test_bfloat16(family, device):
    """The same tokens into both; rounding to 16 bits moves the logits by some per cent anyway."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("PyTorch has no CUDA device")
    model, ids = tiny(family, 97, device, "bfloat16"), prompt(2, 32, device=device)
    caches = ReplayMamba2Cache(model), DynamicCache(config=model.config)
    results = []
    for mine in caches:
        logits = []
        for first, last in ((0, 10), *((i, i + 1) for i in range(10, 32))):
            positions = torch.arange(first, last, device=device).expand(2, -1)
            with torch.no_grad():
                y = model(ids[:, first:last], cache=mine, position_ids=positions).logits
            logits.append(y[:, -1].float())
        results.append(torch.stack(logits))
    assert caches[0].stack.device.kind == device
    assert caches[0].stack.activation_dtype == "bfloat16"
    assert (results[0] - results[1]).norm() < 0.06 * results[1].norm()


@pytest.mark.gpu
@pytest.mark.parametrize("family", PRESENT)
def test_drafts_on_cuda(family):
    if not torch.cuda.is_available():
        pytest.skip("PyTorch has no CUDA device")
    model, ids = tiny(family, 3, "cuda", "bfloat16"), prompt(vocab=3, device="cuda")
    cache = Recording(model)
    drafted = greedy(model, ids, 30, cache=cache, prompt_lookup_num_tokens=5)
    assert drafted.shape == (1, 42)
    assert len(cache.removed) < 30 and sum(cache.removed)


@pytest.mark.gpu
def test_float32_activations_on_cuda():
    if not torch.cuda.is_available():
        pytest.skip("PyTorch has no CUDA device")
    model = tiny("Mamba2", 5, "cuda")
    message = r"^model: expected bfloat16 or float16 on a GPU, got float32$"
    with pytest.raises(TypeError, match=message):
        greedy(model, prompt(vocab=5, device="cuda"), 4, cache=ReplayMamba2Cache(model))


def test_what_projections_are_cut_into_is_readable():
    """Rows of an odd length, odd beginnings, and channels apart are copied; the rest is not."""
    from replayssm_cupy.torch import _readable

    whole = torch.zeros(4, 386, dtype=torch.bfloat16)
    for cut in (whole[:, :64], whole[0, 1:65], whole[:, :64].T):
        copied = _readable(cut)
        assert copied.is_contiguous() and copied.data_ptr() != cut.data_ptr()
        assert torch.equal(copied, cut)
    even = torch.zeros(4, 384, dtype=torch.bfloat16)[:, 64:128]
    assert _readable(even) is even
