"""What only the machine code shows: which conversions it uses, and what a warp waits for."""

from __future__ import annotations

import pathlib
import re
import subprocess

import pytest

from replayssm_cupy import compiler
from replayssm_cupy.keys import CheckpointingSsuKey, MaterializeKey


@pytest.fixture(scope="module")
def nvdisasm() -> pathlib.Path:
    nvidia = pytest.importorskip("nvidia", reason="needs the wheel nvidia-cuda-nvdisasm")
    found = [path for root in nvidia.__path__ for path in pathlib.Path(root).rglob("nvdisasm")]
    if not found:
        pytest.skip("needs the wheel nvidia-cuda-nvdisasm")
    return found[0]


def disassemble(nvdisasm: pathlib.Path, folder: pathlib.Path, key, arch: str, *flags: str) -> str:
    try:
        cubin, _ = compiler.compile_cubin([key], arch)
    except compiler.ReplaySSMError as error:
        if "missing" in str(error):
            pytest.skip(str(error))
        raise
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    command = [nvdisasm, "-c", *flags, path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a", "sm_100"])
@pytest.mark.parametrize("state_dtype", ["float16", "bfloat16", "float8_e4m3fn"])
def test_stochastic_conversion_is_there_where_the_target_has_it(
    nvdisasm, tmp_path, arch, state_dtype
):
    key = CheckpointingSsuKey(state_dtype, "bfloat16", 128, 1)
    code = disassemble(nvdisasm, tmp_path, key, arch)
    assert bool(re.search(r"F2FP\.\S*\.RS\b", code)) == arch.endswith("a")


def instructions(listing: str) -> list[tuple[str, int, int]]:
    """(text, the scoreboard that it sets or 7, the mask of those that it waits for), for sm_90."""
    pairs = re.findall(
        r"/\*[0-9a-f]{4,5}\*/ +(.*?) +/\* 0x[0-9a-f]{16} \*/\s+/\* 0x([0-9a-f]{16}) \*/", listing
    )
    control = [(text, int(high, 16) >> 41) for text, high in pairs]
    return [(text, bits >> 5 & 7, bits >> 11 & 63) for text, bits in control]


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "int8"])
def test_rows_are_asked_for_before_the_checkpoint_is_waited_for(nvdisasm, tmp_path, state_dtype):
    """The loads of B and C go out behind those of the checkpoint without a wait for it between."""
    key = CheckpointingSsuKey(state_dtype, "bfloat16", 128, 1)
    code = instructions(disassemble(nvdisasm, tmp_path, key, "sm_90", "-hex"))
    bytes_of_lane = key.slabs * 2 * 128 // 4 * {"float32": 4, "bfloat16": 2, "int8": 1}[state_dtype]
    wide = [i for i, (text, *_) in enumerate(code) if text.startswith("LDG.E.128")]
    checkpoint = wide[: bytes_of_lane // 16]
    softplus = next(i for i, (text, *_) in enumerate(code) if i > checkpoint[-1] and "MUFU" in text)
    between = range(checkpoint[-1] + 1, softplus)
    rows = [i for i in between if re.search(r"LDG\.E\.(64|128)", code[i][0])]
    assert len(rows) > 4
    boards = {code[i][1] for i in checkpoint}
    waits = [
        code[i][0] for i in between if i < rows[-1] and any(code[i][2] >> b & 1 for b in boards)
    ]
    assert not waits


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_a_snapshot_asks_for_all_of_a_slab_at_once(nvdisasm, tmp_path, state_dtype):
    """State and B of a slab are on their way before a lane waits; no load or store is generic."""
    key = MaterializeKey(state_dtype, "bfloat16", 128)
    code = [
        text for text, *_ in instructions(disassemble(nvdisasm, tmp_path, key, "sm_90", "-hex"))
    ]
    assert not [text for text in code if re.search(r"\b(LD|ST)\.E\b", text)]
    first = next(i for i, text in enumerate(code) if "SHFL" in text)
    wide = [text for text in code[:first] if re.search(r"\bLDG\.E\.128\b", text)]
    copied = folded = 16 * 128 * {"float32": 4, "bfloat16": 2}[state_dtype] // 32 // 16
    rows = 2 * 128 * 2 // 4 // 16 if state_dtype == "bfloat16" else 0  # narrower loads otherwise
    assert len(wide) == copied + folded + rows


@pytest.mark.parametrize(
    "capability, target",
    [("80", "sm_80"), ("90", "sm_90"), ("100", "sm_100a"), ("103", "sm_103a"), ("110", "sm_110"),
     ("120", "sm_120"), ("121", "sm_121")],
)  # fmt: skip
def test_target_of_a_device(capability, target):
    assert compiler.target(capability) == target
