"""What the demo shows: a progress bar while it decodes, and the report at the end."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

from .arrays import itemsize
from .demo_prefix import Reuse
from .keys import COPY_DTYPES, SCALED_FORMATS, SLAB, bytes_of_slab
from .mamba2_weights import Mamba2Config
from .speculative import Flip, Statistics

# Rounding to 16 bits may flip a token whose rival is as near as this, as a part of the logits'
# range; a larger gap is a failure. A 16-bit state is rounded by the plain update after every token
# and by replay once per flush, so these two differ by more, the more the fewer bits there are.
NEAR_TIE = {
    "float32": 1e-3,
    "float16": 2e-3,
    "bfloat16": 8e-3,
    "int8": 2e-2,
    "float8_e4m3fn": 6e-2,
    "float16+fp8": 6e-2,
    "float16+nvfp4": 2e-1,
}
FLIPS_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of one run; rates count the tokens after the first, which the prefill gives."""

    requests: int
    tokens: int
    tokens_per_second: float
    plain_tokens_per_second: float
    tokens_per_step: int  # fed: the newest one and the guesses
    steps: int
    rows: int  # requests times steps, without finished requests
    mean_accepted: float
    accepted_histogram: dict[int, int]
    flushes: int
    state_bytes_per_token: float
    plain_state_bytes_per_token: float
    near_tie: float
    flips: list[Flip]
    prefix: Reuse | None = None

    @property
    def passed(self) -> bool:
        """True if every token is the plain update's, near-ties aside; NaN never passes."""
        return all(flip.relative_gap <= self.near_tie for flip in self.flips)

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        gaps = [{"relative_gap": flip.relative_gap} for flip in self.flips]
        flips = [asdict(flip) | gap for flip, gap in zip(self.flips, gaps, strict=True)]
        verdict = {"equal": not self.flips, "passed": self.passed}
        return asdict(self) | verdict | {"flips": flips}

    def lines(self) -> list[str]:
        """The report as text."""
        histogram = "  ".join(f"{n}: {rows}" for n, rows in self.accepted_histogram.items())
        replay, plain = self.state_bytes_per_token / 1024, self.plain_state_bytes_per_token / 1024
        lines = [
            f"tokens         {self.tokens} of {self.requests} request(s) in {self.steps} steps",
            f"tokens/s       {self.tokens_per_second:.1f} with replay, "
            f"{self.plain_tokens_per_second:.1f} one by one with the plain update",
            f"acceptance     {self.mean_accepted:.2f} of {self.tokens_per_step} tokens a step "
            f"(accepted: steps)  {histogram}",
            f"flushes        {self.flushes} in {self.rows} request steps",
            f"state traffic  {replay:,.0f} KiB per token, plain update {plain:,.0f} KiB "
            f"({plain / replay:.1f} times as much)" if replay else "state traffic  none",
        ]  # fmt: skip
        prefix = [] if self.prefix is None else [self.prefix.line()]
        return lines + prefix + self._equality_lines()

    def _equality_lines(self) -> list[str]:
        if not self.flips:
            return ["equality       token for token equal to plain greedy decoding"]
        worst = max(self.flips, key=lambda flip: flip.relative_gap)
        verdict = "near-ties only" if self.passed else "FAILED"
        lines = [
            f"equality       {verdict}: {len(self.flips)} token(s) differ from plain greedy "
            f"decoding, largest gap {worst.relative_gap:.1e} of the logits' range "
            f"(limit {self.near_tie:.0e})"
        ]
        for flip in self.flips[:FLIPS_SHOWN]:
            lines.append(
                f"               request {flip.request}, position {flip.position}: token "
                f"{flip.token}, plain {flip.plain_token}, logit gap {flip.gap:.2e} of a range of "
                f"{flip.spread:.3g}"
            )
        return lines


def state_traffic(
    config: Mamba2Config, statistics: Statistics, state_dtype: str, activation_dtype: str, fed: int
) -> tuple[float, float]:
    """Bytes of state and ring that cross memory per token: replay, and the plain update.

    Replay reads the state and the live ring rows and writes the fed tokens' rows in every step,
    and writes the state in a flush; the plain update reads and writes the state for every token. Of
    a float16 state with a copy steps read the copy, and flushes read and write both.
    """
    c, item = config, itemsize(activation_dtype)
    scale = itemsize("float32") if state_dtype in SCALED_FORMATS else 0
    rows = c.num_heads * c.head_dim
    state = rows * (bytes_of_slab(state_dtype, c.state_size) // SLAB + scale)
    carried = rows * c.state_size * itemsize("float16") if state_dtype in COPY_DTYPES else 0
    row = (c.intermediate_size + c.n_groups * c.state_size) * item + c.num_heads * 4
    states = (statistics.rows + statistics.flushes) * state + 2 * statistics.flushes * carried
    ring_rows = statistics.ring_rows_read + statistics.rows * fed
    replay = (states + ring_rows * row) / max(statistics.tokens, 1)
    return c.num_hidden_layers * replay, c.num_hidden_layers * 2.0 * (carried or state)


class Progress:
    """A bar of tqdm where it is installed, else one line that counts; both on stderr."""

    def __init__(self, total: int) -> None:
        self._total, self._count = total, 0
        self._bar: Any = None
        try:
            from tqdm import tqdm
        except ImportError:
            return
        self._bar = tqdm(total=total, unit="token", file=sys.stderr)

    def update(self, count: int) -> None:
        """Count tokens."""
        self._count += count
        if self._bar is not None:
            self._bar.update(count)
        elif sys.stderr.isatty():
            print(f"\r{self._count} of {self._total} tokens", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        elif sys.stderr.isatty():
            print(file=sys.stderr)
