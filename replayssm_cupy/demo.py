"""The demo: speculative decoding of a Mamba-2 language model, checked against the plain update.

A prompt is prefilled, then every step verifies a few guessed tokens with ReplaySSM and keeps the
right ones. The report compares the tokens with plain one-token greedy decoding.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from . import compiler
from .demo_prefix import PrefixCache, Reuse, empty_prompt
from .demo_report import NEAR_TIE, Progress, Report, state_traffic
from .errors import ReplaySSMError
from .layer_stack import LayerStack
from .mamba2 import Mamba2, PlainCache, PrefillCache, ReplayCache
from .mamba2_weights import Mamba2Config, fit_head, read_config, read_weights, seeded_weights
from .speculative import Flip, Request, check_against_plain, decode, to_host

SEEDED_MODEL = Mamba2Config(
    vocab_size=256,
    hidden_size=512,
    num_hidden_layers=4,
    num_heads=16,
    head_dim=64,
    state_size=128,
    n_groups=1,
)
TEXTS_SHOWN = 4
OWN_PART = 8  # of a prompt behind the common one: an eighth
BUILT_IN_PROMPT = """\
A state space model carries a fixed state instead of a growing cache. Every token decays the
state a little, adds an outer product to it, and reads it once. Decoding is therefore bound by
memory: the plain update reads the state and writes it back for every single token. Replay keeps
the state where it is. It reads the state, writes only the few numbers of the new token into a
small ring, and replays the ring on the way to the output. When the ring is full, the waiting
tokens are folded into the state, and the state is written once for all of them. Guessed tokens
cost little: a wrong guess is a ring row that the next step overwrites, and the state has never
seen it. So the state is read once for several tokens, and it is written once for many.
"""


class Vocabulary(Protocol):
    """Text to token ids and back."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: list[int]) -> str: ...


class Bytes:
    """One token per byte of UTF-8."""

    def encode(self, text: str) -> list[int]:
        """The bytes of the text."""
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        """The text of the bytes; what is no UTF-8 shows as a replacement character."""
        return bytes(min(token, 255) for token in tokens).decode(errors="replace")


class Tokenizer:
    """A checkpoint's `tokenizer.json`, through the tokenizers package."""

    def __init__(self, path: Path) -> None:
        try:
            import tokenizers
        except ImportError:
            raise ReplaySSMError(
                f'{path.name} needs tokenizers: pip install "replayssm_cupy[demo]"'
            ) from None
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises bare Exceptions
            raise ValueError(f"{path}: {error}") from None

    def encode(self, text: str) -> list[int]:
        """Token ids of the text."""
        return list(self._tokenizer.encode(text).ids)

    def decode(self, tokens: list[int]) -> str:
        """The text of the token ids."""
        return str(self._tokenizer.decode(tokens))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `python -m replayssm_cupy demo`."""
    add = parser.add_argument
    add("--checkpoint", type=Path, metavar="DIR", help="a Hugging Face Mamba2 folder")
    add("--prompt-file", type=Path, metavar="FILE", help="text to start from (the README)")
    add("--prompt-tokens", type=_positive, default=2048, metavar="N", help="of each request")
    add("--batch", type=_positive, default=1, metavar="N", help="requests decoded together")
    add("--max-new-tokens", type=_positive, default=200, metavar="N", help="of each request")
    add("--draft", type=int, default=3, metavar="N", help="guesses per step; 0: plain decode")
    add("--window", type=_positive, default=16, metavar="W", help="most tokens in a ring")
    add(
        "--prefix-cache",
        type=_positive,
        metavar="BLOCK",
        help="at least 2 requests with a common prompt, from snapshots every BLOCK tokens of it",
    )
    add("--state-dtype", default="float32", choices=sorted(NEAR_TIE))
    add("--activation-dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    add("--seed", type=int, default=0, help="of the weights without a checkpoint")
    add("--device", default="cpu", choices=["cpu", "cuda"])
    add("--json", action="store_true", help="print the report as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0, or 1 where a token differs from the plain update by more than a near-tie."""
    if not 0 <= args.draft < args.window:
        raise ValueError(
            f"--draft: expected 0 to --window - 1 = {args.window - 1}, got {args.draft}"
        )
    if args.prefix_cache is not None:
        args.batch = max(args.batch, 2)
    xp = array_module(args.device)
    model, vocabulary, prompts = prepare(args, xp)
    prompt_cache = PrefillCache(model.config, xp)
    logits = to_host(model.logits(model.forward(xp.asarray(prompts), prompt_cache)[:, -1]))
    first, reuse = logits.argmax(axis=-1).tolist(), None
    if args.prefix_cache is None:
        cache = ReplayCache(prompt_cache, make_stack(model.config, args))
    else:
        cache, first, reuse = prefill_from_cache(args, model, prompts.tolist())
    requests = []
    for prompt, token in zip(prompts.tolist(), first, strict=True):
        requests.append(Request(prompt, args.max_new_tokens, model.config.eos_token_ids))
        requests[-1].extend([token])
    live = to_host(cache.stack.prev_num_accepted_tokens).tolist()
    for request, rows in zip(requests, live, strict=False):
        request.live_rows = rows
    report = decode_and_check(args, model, cache, prompt_cache, requests)
    report = replace(report, prefix=reuse, flips=_first_flips(logits, first) + report.flips)
    if args.json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        for index, request in enumerate(requests[:TEXTS_SHOWN]):
            print(f"--- text of request {index}\n{vocabulary.decode(request.generated)}")
        print("---", *report.lines(), sep="\n")
    return 0 if report.passed else 1


def prefill_from_cache(
    args: argparse.Namespace, model: Mamba2, prompts: list[list[int]]
) -> tuple[ReplayCache, list[int], Reuse]:
    """Prompts one after another through the prefix cache: their slots, next tokens, and reuse."""
    blocks = len(prompts[0]) // args.prefix_cache
    stack = make_stack(model.config, args, args.batch + blocks)
    cache = ReplayCache(empty_prompt(model.config, args.batch, model.xp), stack)
    slots = range(args.batch, args.batch + blocks)
    prefixes = PrefixCache(cache, [layer.A for layer in model.layers], slots, args.prefix_cache)
    first = [prefixes.prefill(model, request, prompt) for request, prompt in enumerate(prompts)]
    return cache, first, prefixes.reuse


def _first_flips(logits: np.ndarray[Any, Any], tokens: list[int]) -> list[Flip]:
    """First tokens that the prompt as a whole would have chosen otherwise."""
    return [
        Flip(b, 0, token, int(row.argmax()), float(row.max() - row[token]), float(np.ptp(row)))
        for b, (row, token) in enumerate(zip(logits, tokens, strict=True))
        if token != row.argmax()
    ]


def decode_and_check(
    args: argparse.Namespace,
    model: Mamba2,
    cache: ReplayCache,
    prompt: PrefillCache,
    requests: list[Request],
) -> Report:
    """Decode the requests, each holding its first token, and judge every token."""
    with Progress(args.batch * args.max_new_tokens) as progress:
        progress.update(args.batch)
        statistics = decode(model, cache, requests, args.draft, progress.update)
    flips, plain_seconds = check_against_plain(
        model, PlainCache(prompt, make_stack(model.config, args)), requests
    )
    fed = args.draft + 1
    replay_bytes, plain_bytes = state_traffic(
        model.config, statistics, args.state_dtype, args.activation_dtype, fed
    )
    return Report(
        requests=args.batch,
        tokens=sum(len(request.generated) for request in requests),
        tokens_per_second=statistics.tokens / max(statistics.seconds, 1e-9),
        plain_tokens_per_second=statistics.tokens / max(plain_seconds, 1e-9),
        tokens_per_step=fed,
        steps=statistics.steps,
        rows=statistics.rows,
        mean_accepted=statistics.mean_accepted,
        accepted_histogram={n: statistics.accepted[n] for n in range(1, fed + 1)},
        flushes=statistics.flushes,
        state_bytes_per_token=replay_bytes,
        plain_state_bytes_per_token=plain_bytes,
        near_tie=NEAR_TIE[args.state_dtype],
        flips=flips,
    )


def prepare(args: argparse.Namespace, xp: Any) -> tuple[Mamba2, Vocabulary, np.ndarray[Any, Any]]:
    """Model, vocabulary and prompts (batch, tokens): every request starts elsewhere in the text."""
    vocabulary: Vocabulary = Bytes()
    config = SEEDED_MODEL
    if args.checkpoint is not None:
        config = read_config(args.checkpoint)
        if (args.checkpoint / "tokenizer.json").is_file():
            vocabulary = Tokenizer(args.checkpoint / "tokenizer.json")
        elif config.vocab_size < 256:
            raise ValueError(
                f"--checkpoint: without tokenizer.json bytes are the tokens, expected "
                f"vocab_size of at least 256, got {config.vocab_size}"
            )
        weights = read_weights(args.checkpoint, config)
    else:
        weights = seeded_weights(args.seed, config)
    text = np.array(vocabulary.encode(read_prompt(args.prompt_file)), np.int64)
    if text.size < 2:
        raise ValueError(f"--prompt-file: expected at least 2 tokens, got {text.size}")
    if text.max() >= config.vocab_size:
        raise ValueError(
            f"tokenizer.json: expected ids below vocab_size = {config.vocab_size}, got {text.max()}"
        )
    prompts = make_prompts(args, text)
    model = Mamba2(config, weights, xp, args.activation_dtype)
    if args.checkpoint is None:
        hidden = model.forward(xp.asarray(prompts[:1, :-1]), PrefillCache(config, xp))[0]
        model.head = xp.asarray(fit_head(to_host(hidden), prompts[0, 1:], config.vocab_size))
    return model, vocabulary, prompts


def make_prompts(args: argparse.Namespace, text: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A part of the text for each request, or with a prefix cache its beginning and then a part."""
    starts = [b * text.size // args.batch for b in range(args.batch)]
    prompts = np.stack([np.roll(text, -start)[: args.prompt_tokens] for start in starts])
    if args.prefix_cache is not None:
        own = max(prompts.shape[1] // OWN_PART, 1)
        common = np.broadcast_to(prompts[0, :-own], (args.batch, prompts.shape[1] - own))
        prompts = np.concatenate([common, prompts[:, -own:]], axis=1)
    return prompts


def read_prompt(path: Path | None) -> str:
    """The file's text; without one the README of a checkout, else a built-in text."""
    if path is not None:
        return path.read_text(encoding="utf-8", errors="replace")
    readme = Path(__file__).resolve().parent.parent / "README.md"
    return readme.read_text(encoding="utf-8") if readme.is_file() else BUILT_IN_PROMPT


def array_module(device: str) -> Any:
    """NumPy for the CPU, CuPy for CUDA; raises ReplaySSMError without CuPy or a GPU."""
    if device == "cpu":
        return np
    compiler.require_gpu(0)
    return compiler.import_cupy()


def make_stack(
    config: Mamba2Config, args: argparse.Namespace, slots: int | None = None
) -> LayerStack:
    """A LayerStack with one slot per request, or as many as are asked for."""
    return LayerStack(
        config.num_hidden_layers,
        args.batch if slots is None else slots,
        config.num_heads,
        config.head_dim,
        config.n_groups,
        config.state_size,
        max_window=args.window,
        npredicted=args.draft + 1,
        state_dtype=args.state_dtype,
        activation_dtype=args.activation_dtype,
        device=args.device,
    )


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {text}")
    return int(text)
