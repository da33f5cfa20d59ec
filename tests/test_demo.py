"""The demo: drafts, rollback, the equality report, the command line and its errors."""

from __future__ import annotations

import argparse
import builtins
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replayssm_cupy import LayerStack, compiler, demo
from replayssm_cupy.__main__ import main
from replayssm_cupy.demo_report import NEAR_TIE, Progress, state_traffic
from replayssm_cupy.mamba2 import Mamba2, PlainCache, PrefillCache, ReplayCache
from replayssm_cupy.mamba2_weights import Mamba2Config, seeded_weights
from replayssm_cupy.speculative import (
    PromptLookup,
    Request,
    Statistics,
    check_against_plain,
    count_accepted,
    decode,
)

TINY = Mamba2Config(
    vocab_size=256,
    hidden_size=128,
    num_hidden_layers=2,
    num_heads=4,
    head_dim=64,
    state_size=64,
    n_groups=2,
)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "SEEDED_MODEL", TINY)


def plain_cache(prompt: PrefillCache) -> PlainCache:
    """The plain path of a prompt with float32 states."""
    c, batch = prompt.config, len(prompt.states[0])
    stack = LayerStack(
        c.num_hidden_layers, batch, c.num_heads, c.head_dim, c.n_groups, c.state_size, device="cpu"
    )
    return PlainCache(prompt, stack)


def run_json(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    fast = ["--prompt-tokens", "900", "--max-new-tokens", "40", "--json"]
    status = main(["demo", *fast, *words])
    return status, json.loads(capsys.readouterr().out)


def prefilled(config: Mamba2Config, batch: int, seed: int = 0) -> tuple[Mamba2, PrefillCache]:
    model = Mamba2(config, seeded_weights(seed, config))
    cache = PrefillCache(config, np)
    model.forward(np.random.default_rng(seed).integers(0, 256, (batch, 70)), cache)
    return model, cache


def stack_of(config: Mamba2Config, batch: int, tokens: int) -> Any:
    args = argparse.Namespace(
        batch=batch,
        window=16,
        draft=tokens - 1,
        state_dtype="float32",
        activation_dtype="bfloat16",
        device="cpu",
    )
    return demo.make_stack(config, args)


def test_prompt_lookup_takes_the_latest_longest_match() -> None:
    lookup = PromptLookup()
    for token in [1, 2, 3, 9, 2, 3, 4, 1, 2, 3]:
        lookup.append(token)
    # (1, 2, 3) was followed by 9, the shorter (2, 3) later by 4: the longer match decides.
    assert lookup.propose(3) == [9, 2, 3]
    lookup.append(7)
    assert lookup.propose(2) == [7, 7]


def test_count_accepted_stops_at_the_first_wrong_guess() -> None:
    tokens = np.array([[5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8]])
    choices = np.array([[6, 7, 8, 9], [6, 0, 8, 9], [0, 7, 8, 9]])
    accepted = count_accepted(np, tokens, choices)
    assert accepted.tolist() == [4, 2, 1]
    assert accepted.dtype == np.int32


def test_request_ends_at_the_limit_and_at_the_end_of_text() -> None:
    request = Request([1, 2], max_new_tokens=3, eos_token_ids=(9,))
    assert (request.extend([4, 5]), request.finished) == (2, False)
    assert (request.extend([6, 7]), request.finished) == (1, True)
    assert request.generated == [4, 5, 6]
    request = Request([1, 2], max_new_tokens=3, eos_token_ids=(9,))
    assert (request.extend([9, 4]), request.finished) == (1, True)


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("draft", ["0", "3", "7"])
def test_tokens_equal_the_plain_update(draft: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, report = run_json(capsys, "--draft", draft)
    assert status == 0
    assert report["equal"] and report["tokens"] == 40
    accepted = {int(n): rows for n, rows in report["accepted_histogram"].items()}
    assert set(accepted) == set(range(1, int(draft) + 2))
    assert sum(accepted.values()) == report["rows"] == report["steps"]
    # The last step may keep tokens beyond the limit.
    assert 39 <= sum(n * rows for n, rows in accepted.items()) <= 39 + int(draft)
    assert report["flushes"] > 0
    if draft != "0":
        assert len([rows for rows in accepted.values() if rows]) > 1, "acceptance never varied"


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_state(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, report = run_json(capsys, "--state-dtype", dtype, "--batch", "2")
    assert status == 0
    assert report["tokens"] == 80
    assert report["near_tie"] == NEAR_TIE[dtype]
    full = 2 * TINY.num_hidden_layers * TINY.intermediate_size * TINY.state_size * 2
    assert report["plain_state_bytes_per_token"] == full


def test_rows_of_a_batch_are_independent() -> None:
    """Rows that accept differently and end early leave the others as they are alone."""
    model, prompt = prefilled(TINY, 3)
    cache = ReplayCache(prompt, stack_of(TINY, 3, 4))
    requests = [Request(range(65, 80), 30 - 9 * b, ()) for b in range(3)]
    for b, request in enumerate(requests):
        request.extend([70 + b])
    statistics = decode(model, cache, requests, draft=3)
    assert [len(request.generated) for request in requests] == [30, 21, 12]
    assert statistics.rows < 3 * statistics.steps
    for b, request in enumerate(requests):
        alone = plain_cache(slot_of(prompt, b))
        token, expected = 70 + b, [70 + b]
        while len(expected) < len(request.generated):
            logits = model.logits(model.forward(np.array([[token]]), alone))
            alone.commit()
            token = int(logits.argmax())
            expected.append(token)
        assert request.generated == expected, f"request {b}"
    prev = cache.stack.prev_num_accepted_tokens
    assert prev.tolist() == [request.live_rows for request in requests]


def slot_of(prompt: PrefillCache, b: int) -> PrefillCache:
    single = PrefillCache(prompt.config, np)
    single.states = [state[b : b + 1].copy() for state in prompt.states]
    single.conv_tails = [tail[b : b + 1].copy() for tail in prompt.conv_tails]
    return single


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("limit", [(0.0, np.inf), (0.01, 0.05)])
def test_rejected_tokens_leave_no_trace(gated: bool, limit: tuple[float, float]) -> None:
    """Random acceptance of wrong drafts, against a prefill of the tokens that were kept."""
    config = replace(TINY, time_step_limit=limit)
    weights = seeded_weights(1, config)
    for layer in weights.layers:
        layer.gate_norm = layer.gate_norm if gated else None
    model = Mamba2(config, weights, activation_dtype="float32")
    rng = np.random.default_rng(2)
    text = rng.integers(0, 256, (2, 60))
    expected = model.logits(model.forward(text, PrefillCache(config, np)))
    prompt = PrefillCache(config, np)
    model.forward(text[:, :5], prompt)
    args = argparse.Namespace(batch=2, window=8, draft=3, device="cpu")
    args.state_dtype = args.activation_dtype = "float32"
    cache = ReplayCache(prompt, demo.make_stack(config, args))
    place = np.array([5, 5])
    while (place < 56).any():
        live = place < 56
        cache.select(np.where(live, [0, 1], -1))
        kept = rng.integers(1, 5, 2).astype(np.int32)
        fed = rng.integers(0, 256, (2, 4))
        for b in np.flatnonzero(live):
            fed[b, : kept[b]] = text[b, place[b] : place[b] + kept[b]]
        logits = model.logits(model.forward(fed, cache))
        cache.commit(kept)
        for b in np.flatnonzero(live):
            wanted = expected[b, place[b] : place[b] + kept[b]]
            # float32 all the way: the sums of 128 products in another order.
            np.testing.assert_allclose(
                logits[b, : kept[b]], wanted, rtol=0, atol=2e-5 * np.abs(expected).max()
            )
            place[b] += kept[b]


@pytest.mark.usefixtures("tiny")
def test_a_wrong_token_is_a_failure_with_its_position(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scan = ReplayCache.scan
    monkeypatch.setattr(ReplayCache, "scan", lambda *call: -scan(*call))
    status, report = run_json(capsys)
    assert status == 1
    assert not report["equal"] and not report["passed"]
    flip = report["flips"][0]
    assert flip["token"] != flip["plain_token"]
    assert flip["gap"] > 0 and flip["relative_gap"] > NEAR_TIE["float32"]
    assert main(["demo", "--prompt-tokens", "900", "--max-new-tokens", "40"]) == 1
    text = capsys.readouterr().out
    assert "FAILED" in text and f"position {flip['position']}: token {flip['token']}" in text


def test_nan_logits_never_pass() -> None:
    model, prompt = prefilled(TINY, 1)
    model.head = np.full_like(model.head, np.nan)
    request = Request([1], 4)
    request.extend([0, 0, 0, 0])
    flips, _ = check_against_plain(model, plain_cache(prompt), [request])
    assert len(flips) == 3
    assert not any(flip.relative_gap <= NEAR_TIE["float32"] for flip in flips)


def test_state_traffic_counts_states_and_ring_rows() -> None:
    """Two steps of four tokens, one flush, three live rows read, five tokens kept."""
    statistics = Statistics(rows=2, tokens=5, flushes=1, ring_rows_read=3)
    replay, plain = state_traffic(TINY, statistics, "float32", "bfloat16", fed=4)
    state = 4 * 64 * 64 * 4
    row = 4 * 64 * 2 + 2 * 64 * 2 + 4 * 4
    assert replay == pytest.approx(2 * (3 * state + (3 + 2 * 4) * row) / 5)
    assert plain == 2 * 2 * state


@pytest.mark.usefixtures("tiny")
def test_progress_without_tqdm(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Progress(7) as progress:
        progress.update(3)
        progress.update(4)
    assert capsys.readouterr().err == "\r3 of 7 tokens\r7 of 7 tokens\n"


def test_command_line(tmp_path: Path) -> None:
    """The real model through the interpreter, with a prompt of its own."""
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("one two three four five six seven eight nine ten " * 4)
    words = ["--prompt-file", str(prompt), "--max-new-tokens", "12", "--batch", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "replayssm_cupy", "demo", *words],
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # steady on a busy machine
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    for word in ("text of request 1", "tokens/s", "acceptance", "flushes", "state traffic"):
        assert word in done.stdout
    assert "equality       token for token" in done.stdout


def write_checkpoint(folder: Path, **changes: Any) -> Path:
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_heads", "head_dim")
    config = {name: getattr(TINY, name) for name in (*names, "state_size", "n_groups")} | changes
    kept = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"num_heads": None, "n_groups": None}, "missing num_heads, n_groups"),
    ({"head_dim": 32, "num_heads": 8}, "head_dim: expected one of (64, 80, 96, 128), got 32"),
    ({"state_size": 16}, "state_size: expected one of (64, 128, 256), got 16"),
    ({"num_heads": 3}, "num_heads * head_dim: expected expand * hidden_size = 256, got 3 * 64"),
    ({"n_groups": 3}, "n_groups: expected a divisor of num_heads = 4, got 3"),
    ({"hidden_act": "gelu"}, "hidden_act: expected silu or swish, got gelu"),
    ({"model_type": "llama"}, "expected model_type mamba2, got llama"),
    ({"vocab_size": 64}, "expected vocab_size of at least 256, got 64"),
    ({}, "holds no model.safetensors"),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES)
def test_a_bad_checkpoint_is_one_line(
    changes: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("safetensors", reason="checkpoints are read with safetensors")
    folder = write_checkpoint(tmp_path, **changes)
    assert main(["demo", "--checkpoint", str(folder)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--checkpoint", "/no/such"], "no such folder: /no/such"),
        (["--prompt-file", "/no/such"], "No such file"),
        (["--draft", "16"], "--draft: expected 0 to --window - 1 = 15, got 16"),
        (["--window", "40"], "max_window: expected"),
    ],
)
def test_a_bad_option_is_one_line(
    words: list[str], message: str, tiny: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_no_gpu_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    if compiler.gpu_count():
        pytest.skip("needs a machine without a GPU")
    assert main(["demo", "--device", "cuda"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_missing_packages_are_named_with_the_pip_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    present = builtins.__import__

    def absent(name: str, *rest: Any, **more: Any) -> Any:
        if name in ("safetensors", "tokenizers"):
            raise ImportError(name)
        return present(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", absent)
    folder = write_checkpoint(tmp_path)
    for missing in ("safetensors", "tokenizers"):
        assert main(["demo", "--checkpoint", str(folder)]) == 2
        error = capsys.readouterr().err
        assert missing in error and 'pip install "replayssm_cupy[demo]"' in error
        (folder / "tokenizer.json").write_text("{}")


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_prefix_cache(state_dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Requests behind the first start from its snapshots, and say what uncached ones say."""
    status, report = run_json(
        capsys, "--prefix-cache", "48", "--batch", "3", "--draft", "4", "--state-dtype", state_dtype
    )
    assert status == 0 and report["passed"]
    if state_dtype == "float32":
        assert report["equal"]
    # 900 tokens, of which all but an eighth are common: 788 hold 16 blocks of 48.
    reuse = report["prefix"]
    assert reuse["block"] == 48 and reuse["snapshots"] == 900 // 48
    assert reuse["reused"] == 2 * (788 // 48) * 48
    assert reuse["fed"] == 3 * 900 - reuse["reused"]


@pytest.mark.usefixtures("tiny")
def test_prefix_cache_without_a_whole_block(capsys: pytest.CaptureFixture[str]) -> None:
    status, report = run_json(capsys, "--prefix-cache", "5000")
    assert status == 0 and report["equal"] and report["requests"] == 2
    assert report["prefix"] == {"block": 5000, "fed": 1800, "reused": 0, "snapshots": 0}


@pytest.mark.usefixtures("tiny")
def test_a_wrong_snapshot_is_seen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Snapshots that hold something else: the report must say so."""
    right = LayerStack.materialize_blocks

    def other(stack: LayerStack, src: Any, dst: Any, *lengths: Any, **options: Any) -> None:
        right(stack, src, dst, *lengths, **options)
        for state in stack.states:
            state[dst] = 1000

    monkeypatch.setattr(LayerStack, "materialize_blocks", other)
    status, report = run_json(capsys, "--prefix-cache", "50", "--draft", "4")
    assert status == 1 and not report["passed"]
