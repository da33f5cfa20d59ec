"""Every wrapper of cuda/ptx.cuh has a twin on the host, with the same parameters."""

from __future__ import annotations

import re

from host.builder import EMU
from host.launcher import CUDA

FUNCTION = re.compile(r"(?:__device__ __forceinline__|inline) [\w ]+?[*&]? ?(\w+)\(([^()]*)\) \{")


def wrappers(text):
    """Name -> parameter types, of the functions in namespace ptx that have no template types."""
    text = re.sub(r"//.*", "", text[text.index("namespace ptx {") :])
    text = re.sub(r"\(&(\w+)\)\[", r"& \1[", text)  # float (&d)[4] has parentheses of its own
    text = re.sub(r"\s+", " ", text)
    text = re.sub(r"> void (\w+)\(", r"> inline void \1(", text)
    found = {}
    for name, parameters in FUNCTION.findall(text):
        found[name] = [parameter_type(p) for p in parameters.split(",") if p.strip()]
    return found


def parameter_type(declaration):
    declaration = declaration.split("=")[0].replace("uint32_t", "unsigned")
    return re.sub(r"\b\w+ *(\[\w*\])? *$", r"\1", declaration.strip()).replace(" ", "")


def test_every_wrapper_has_its_twin():
    text = (CUDA / "ptx.cuh").read_text()
    device = wrappers(text)
    host = wrappers((EMU / "ptx_host.hpp").read_text())
    assert len(device) == text.count("__device__")
    assert device["mma_m16n8k16_bf16"][0] == "float&[4]"
    assert {name: host.get(name) for name in device} == device
