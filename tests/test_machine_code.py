"""What only the machine code shows: which conversions it uses, and what a warp waits for."""

from __future__ import annotations

import pathlib
import re
import subprocess

import pytest

from replayssm_cupy import compiler
from replayssm_cupy.keys import (
    CheckpointingSsuKey,
    LoadStateKey,
    MaterializeKey,
    SmallCheckpointingSsuKey,
)
from replayssm_cupy.schedule import most_quads


@pytest.fixture(scope="module")
def nvdisasm() -> pathlib.Path:
    nvidia = pytest.importorskip("nvidia", reason="needs the wheel nvidia-cuda-nvdisasm")
    found = [path for root in nvidia.__path__ for path in pathlib.Path(root).rglob("nvdisasm")]
    if not found:
        pytest.skip("needs the wheel nvidia-cuda-nvdisasm")
    return found[0]


def disassemble(nvdisasm: pathlib.Path, folder: pathlib.Path, key, arch: str) -> str:
    try:
        cubin, _ = compiler.compile_cubin([key], arch)
    except compiler.ReplaySSMError as error:
        if "missing" in str(error):
            pytest.skip(str(error))
        raise
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    command = [nvdisasm, "-c", path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a", "sm_100"])
@pytest.mark.parametrize("state_dtype", ["float16", "bfloat16", "float8_e4m3fn"])
def test_stochastic_conversion_is_there_where_the_target_has_it(
    nvdisasm, tmp_path, arch, state_dtype
):
    key = CheckpointingSsuKey(state_dtype, "bfloat16", 128, 1)
    code = disassemble(nvdisasm, tmp_path, key, arch)
    assert bool(re.search(r"F2FP\.\S*\.RS\b", code)) == arch.endswith("a")


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a", "sm_120a", "sm_100", "sm_120"])
def test_e2m1_conversion_is_there_where_the_target_has_it(nvdisasm, tmp_path, arch):
    code = disassemble(nvdisasm, tmp_path, LoadStateKey("float16+nvfp4", "float32"), arch)
    assert bool(re.search(r"F2FP\.\S*E2M1\S*\b", code)) == arch.endswith("a")


def instructions(listing: str) -> list[str]:
    return re.findall(r"/\*[0-9a-f]{4,5}\*/ +(.*?) *;", listing)


def places(code: list[str], pattern: str) -> list[int]:
    return [i for i, text in enumerate(code) if re.search(pattern, text)]


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "int8"])
def test_small_form_asks_for_everything_before_it_waits(nvdisasm, tmp_path, state_dtype):
    """Product warps have asked for rows and tokens when they compute the first product, and then
    nothing until they wait. State warps ask for all pieces of their rows at once."""
    key = SmallCheckpointingSsuKey(state_dtype, "bfloat16", 128, 1)
    code = instructions(disassemble(nvdisasm, tmp_path, key, "sm_90"))
    asks, product = places(code, r"\bLDG\b"), places(code, r"\bHMMA\.1688\b")[0]
    # Of state warps with several rows a lane and with one, and of product warps.
    waits = places(code, r"^BAR\.SYNC\S* 0x1\b")
    *of_state, of_product = waits
    assert len(waits) == 3 and of_state[-1] < product < of_product
    assert len([i for i in asks if i < product and ".128" in code[i]]) >= 8  # B and C
    assert not [i for i in asks if product < i < of_product]
    pieces = 128 * {"float32": 4, "bfloat16": 2, "int8": 1}[state_dtype] // 128
    for wait, quads in zip(of_state, (most_quads(key), 1), strict=True):
        first = max((i for i in waits if i < wait), default=0)
        wide = [i for i in asks if first < i < wait and "LDG.E.128" in code[i]]
        assert len(wide) >= pieces * quads
        assert not places(code[wide[0] : wide[-1]], r"\b(FFMA|SHFL|BAR)\b")


def test_small_form_does_not_divide(nvdisasm, tmp_path):
    key = SmallCheckpointingSsuKey("int8", "bfloat16", 128, 2)
    code = instructions(disassemble(nvdisasm, tmp_path, key, "sm_90"))
    assert not places(code, r"\bI2F\.U32\.RP\b")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_small_form_prefetches_before_it_follows_the_kernel_ahead(nvdisasm, tmp_path, arch):
    """Where launches may be dependent; before the wait it looks at the slot, and again behind."""
    key = SmallCheckpointingSsuKey("int8", "bfloat16", 128, 1)
    code = instructions(disassemble(nvdisasm, tmp_path, key, arch))
    prefetches = [i for i, text in enumerate(code) if "CCTL.E.PF2" in text]
    waits = [i for i, text in enumerate(code) if text.startswith("ACQBULK")]
    assert bool(prefetches) == bool(waits) == (arch == "sm_90")
    if waits:
        (wait,) = waits
        assert len(places(code[:wait], r"\bCALL\b")) == 1  # of the function that prefetches
        early = places(code[:wait], r"\b(LDG|LD|STG|ST|LDGSTS|ATOMG)\b")
        assert [code[i].split()[0] for i in early] == ["LDG.E", "LDG.E"]  # halves of the slot
        again = places(code, r"\bLD\S*\.STRONG\.GPU\b")
        assert len(again) == 2 and min(again) > wait and min(prefetches) > wait


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "int8"])
def test_a_snapshot_asks_for_a_slab_before_it_waits(nvdisasm, tmp_path, arch, state_dtype):
    """The first slab is on its way before the rows of B are waited for. The next one is asked for
    before a slab is stored where folding is slow, else behind. A copy asks for eight vectors at
    once."""
    key = MaterializeKey(state_dtype, "bfloat16", 128)
    code = instructions(disassemble(nvdisasm, tmp_path, key, arch))
    asks = [i for i, text in enumerate(code) if re.search(r"\bLDG\.E\.128\b", text)]
    waits = [i for i, text in enumerate(code) if re.search(r"\b(MOVM|SHFL)\b", text)]
    stores = [i for i, text in enumerate(code) if re.search(r"\bSTG?\.E\.128\b", text)]
    copied, folded = 8, 4 if state_dtype == "int8" else 8
    assert len([i for i in asks if i < waits[0]]) == copied + folded
    loops = 1 if state_dtype == "float32" else 2  # to nearest and stochastically
    assert len([i for i in asks if i > waits[0]]) == loops * folded
    folding = "".join("a" if i in asks else "s" for i in sorted(asks + stores) if i > waits[0])
    first, then = ("a", "s") if state_dtype == "int8" else ("s", "a")
    assert re.fullmatch(f"({first}+{then}+){{{loops}}}", folding)


@pytest.mark.parametrize(
    "capability, target",
    [("80", "sm_80"), ("90", "sm_90"), ("100", "sm_100a"), ("103", "sm_103a"), ("110", "sm_110"),
     ("120", "sm_120"), ("121", "sm_121")],
)  # fmt: skip
def test_target_of_a_device(capability, target):
    assert compiler.target(capability) == target
