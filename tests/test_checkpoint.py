"""Checkpoints written by transformers, decoded by the demo's model against transformers itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the checkpoint's reference needs torch")
transformers = pytest.importorskip("transformers", reason="it writes and runs the checkpoint")
pytest.importorskip("safetensors", reason="checkpoints are read with safetensors")

from replayssm_cupy import LayerStack  # noqa: E402
from replayssm_cupy.__main__ import main  # noqa: E402
from replayssm_cupy.mamba2 import Mamba2, PlainCache, PrefillCache, ReplayCache  # noqa: E402
from replayssm_cupy.mamba2_weights import read_config, read_weights  # noqa: E402
from replayssm_cupy.speculative import Request, decode  # noqa: E402

SIZES = {
    "num_heads": 4,
    "head_dim": 64,
    "vocab_size": 256,
    "hidden_size": 128,
    "state_size": 64,
    "num_hidden_layers": 3,
    "n_groups": 1,
    "chunk_size": 16,
}
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "one group": {},
    "two groups, biases, dt limits": {
        "n_groups": 2,
        "use_bias": True,
        "time_step_limit": (0.02, 0.05),
        "layer_norm_epsilon": 1e-3,
    },
    "tied, no conv bias, wide state": {
        "tie_word_embeddings": True,
        "use_conv_bias": False,
        "state_size": 128,
        "conv_kernel": 3,
    },
}
# Both sides compute in float32, in another order.
RELATIVE = 1e-5


def plain_cache(prompt: PrefillCache) -> PlainCache:
    """The plain path of a prompt with float32 states."""
    c, batch = prompt.config, len(prompt.states[0])
    stack = LayerStack(
        c.num_hidden_layers, batch, c.num_heads, c.head_dim, c.n_groups, c.state_size, device="cpu"
    )
    return PlainCache(prompt, stack)


def write_checkpoint(folder: Path, **changes: Any) -> Any:
    """A small model with every weight random, saved to the folder."""
    torch.manual_seed(0)
    model = transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**(SIZES | changes))).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or "bias" in name or name.endswith(".D"):
                weight += 0.1 * torch.randn_like(weight)
    model.save_pretrained(folder)
    return model


def read_model(folder: Path) -> Mamba2:
    config = read_config(folder)
    return Mamba2(config, read_weights(folder, config), activation_dtype="float32")


def reference_logits(model: Any, tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        logits = model(torch.tensor(tokens), use_cache=False).logits
    return np.asarray(logits.float().numpy())


def assert_close(actual: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> None:
    assert np.isfinite(actual).all()
    error = np.abs(actual - expected).max() / np.abs(expected).max()
    assert error < RELATIVE, f"relative error {error:.1e}"


@pytest.fixture(params=CHECKPOINTS.values(), ids=CHECKPOINTS.keys())
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Mamba2]:
    return write_checkpoint(tmp_path, **request.param), read_model(tmp_path)


TOKENS = np.random.default_rng(0).integers(0, 256, (2, 90))


def prefilled(model: Mamba2, length: int) -> PrefillCache:
    cache = PrefillCache(model.config, np)
    model.forward(TOKENS[:, :length], cache)
    return cache


def test_prefill_logits(checkpoint: tuple[Any, Mamba2]) -> None:
    theirs, ours = checkpoint
    logits = ours.logits(ours.forward(TOKENS, PrefillCache(ours.config, np)))
    assert_close(logits, reference_logits(theirs, TOKENS))


@pytest.mark.parametrize("prompt", [2, 70])
def test_plain_decode_logits(checkpoint: tuple[Any, Mamba2], prompt: int) -> None:
    """Token by token behind a prompt, one of them shorter than the convolution."""
    theirs, ours = checkpoint
    cache = plain_cache(prefilled(ours, prompt))
    logits = []
    for t in range(prompt, prompt + 20):
        logits.append(ours.logits(ours.forward(TOKENS[:, t : t + 1], cache)))
        cache.commit()
    expected = reference_logits(theirs, TOKENS[:, : prompt + 20])[:, prompt:]
    assert_close(np.concatenate(logits, axis=1), expected)


def test_replay_decode_logits(checkpoint: tuple[Any, Mamba2]) -> None:
    """Four tokens a step over a ring that wraps and flushes, all kept."""
    theirs, ours = checkpoint
    c = ours.config
    stack = LayerStack(
        c.num_hidden_layers,
        2,
        c.num_heads,
        c.head_dim,
        c.n_groups,
        c.state_size,
        max_window=10,
        npredicted=4,
        activation_dtype="float32",
        device="cpu",
    )
    cache = ReplayCache(prefilled(ours, 50), stack)
    logits = []
    for t in range(50, 90, 4):
        logits.append(ours.logits(ours.forward(TOKENS[:, t : t + 4], cache)))
        cache.commit(np.array([4, 4], np.int32))
    expected = reference_logits(theirs, TOKENS)[:, 50:]
    assert_close(np.concatenate(logits, axis=1), expected)


def test_speculative_tokens_equal_generate(tmp_path: Path) -> None:
    """Greedy `generate` of transformers and our speculative decoding give the same tokens."""
    theirs, ours = write_checkpoint(tmp_path), read_model(tmp_path)
    prompt = TOKENS[:1, :40]
    with torch.no_grad():
        whole = theirs.generate(
            torch.tensor(prompt), max_new_tokens=30, do_sample=False, eos_token_id=None
        )
    cache = PrefillCache(ours.config, np)
    first = ours.logits(ours.forward(prompt, cache)[:, -1]).argmax(axis=-1)
    stack = LayerStack(3, 1, 4, 64, 1, 64, npredicted=4, activation_dtype="float32", device="cpu")
    request = Request(prompt[0].tolist(), max_new_tokens=30)
    request.extend(first.tolist())
    decode(ours, ReplayCache(cache, stack), [request], draft=3)
    assert request.generated == whole[0, 40:].tolist()


def test_sharded_bfloat16(tmp_path: Path) -> None:
    """Several files and an index; bfloat16 values are read exactly."""
    theirs = write_checkpoint(tmp_path / "whole").to(torch.bfloat16)
    folder = tmp_path / "shards"
    theirs.save_pretrained(folder, max_shard_size="200KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    ours = read_model(folder)
    logits = ours.logits(ours.forward(TOKENS, PrefillCache(ours.config, np)))
    assert_close(logits, reference_logits(theirs.float(), TOKENS))


def test_config_keys(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, time_step_limit=(0.0, float("inf")), eos_token_id=[7, 9])
    config = read_config(tmp_path)
    assert config.time_step_limit == (0.0, float("inf"))
    assert config.eos_token_ids == (7, 9)
    assert (config.chunk_size, config.conv_kernel, config.expand) == (16, 4, 2)


@pytest.mark.parametrize("tokenizer", [False, True])
def test_demo_of_a_checkpoint(
    tokenizer: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path)
    if tokenizer:
        tokenizers = pytest.importorskip("tokenizers", reason="reads tokenizer.json")
        words = {word: index for index, word in enumerate(["the", "state", "<unk>"])}
        model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
        model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        model.save(str(tmp_path / "tokenizer.json"))
    words = ["--prompt-tokens", "100", "--max-new-tokens", "20", "--json", "--batch", "2"]
    assert main(["demo", "--checkpoint", str(tmp_path), *words]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] and 2 < report["tokens"] <= 40


def test_broken_files_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path)
    capsys.readouterr()
    for name in ("tokenizer.json", "model.safetensors", "config.json"):
        (tmp_path / name).write_text("[1, 2")
        assert main(["demo", "--checkpoint", str(tmp_path)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1
        if name == "tokenizer.json":
            assert name in error
            (tmp_path / name).unlink()


def test_a_missing_or_misshapen_tensor_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"num_hidden_layers": 4}))
    assert main(["demo", "--checkpoint", str(tmp_path)]) == 2
    assert "no tensor backbone.layers.3." in capsys.readouterr().err
    path.write_text(json.dumps(config | {"state_size": 128}))
    assert main(["demo", "--checkpoint", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "mixer.conv1d.weight: expected (512, 1, 4) as config.json says" in error
    assert error.count("\n") == 1
