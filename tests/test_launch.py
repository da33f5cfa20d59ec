"""The launch path: what the driver is told, and calls that come again."""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import replace
from typing import Any

import pytest

from replayssm_cupy import ReplaySSMError, compiler, driver, plan
from replayssm_cupy.arrays import Device
from replayssm_cupy.keys import (
    AdvanceRingKey,
    CheckpointingSsuKey,
    PlainCheckpointingSsuKey,
    replay_keys,
    two_kernel_key,
)
from replayssm_cupy.schedule import Processor, SmallFlag, Step, schedule, typical

# --- The driver ----------------------------------------------------------------------------------

# A driver that writes down what cuLaunchKernelEx brings; sizes and offsets are the compiler's own.
DRIVER = r"""
#include <stddef.h>
#include <string.h>
typedef struct { int id; char pad[8 - sizeof(int)]; union { char bytes[64]; int allowed; } value; }
    Attribute;
typedef struct {
  unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
  void* stream;
  Attribute* attributes;
  unsigned num_attributes;
} Config;
long long seen[16];
unsigned char record[4096];
int record_bytes, status, statuses_left;
int layout[] = {sizeof(Attribute), offsetof(Attribute, value), sizeof(Config),
                offsetof(Config, stream), offsetof(Config, attributes),
                offsetof(Config, num_attributes)};
int cuLaunchKernelEx(const Config* c, void* function, void** parameters, void** extra) {
  long long now[] = {c->grid_x, c->grid_y, c->grid_z, c->block_x, c->block_y, c->block_z,
                     c->shared_bytes, (long long)c->stream, c->num_attributes,
                     c->attributes[0].id, c->attributes[0].value.allowed, (long long)function,
                     extra != 0};
  memcpy(seen, now, sizeof(now));
  memcpy(record, parameters[0], record_bytes);
  return statuses_left-- > 0 ? status : 0;
}
int cuGetErrorName(int s, const char** text) { *text = "CUDA_ERROR_TESTED"; return 0; }
int cuGetErrorString(int s, const char** text) { *text = "as planted"; return 0; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    command = ["gcc", "-shared", "-fPIC", "-o", folder / "libcuda.so", folder / "driver.c"]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(folder / "libcuda.so"))


class Runtime:
    """CuPy's runtime on a machine of two devices; `current` is this thread's."""

    def __init__(self) -> None:
        self.current, self.calls = 0, []
        self.count, self.asked = 2, 0

    def getDevice(self) -> int:  # noqa: N802  # CuPy's names
        self.asked += 1
        return self.current

    def getDeviceCount(self) -> int:  # noqa: N802
        return self.count

    def setDevice(self, index: int) -> None:  # noqa: N802
        self.current = index
        self.calls.append(index)


@pytest.fixture
def runtime(library, monkeypatch) -> Runtime:
    """A GPU of compute capability 9.0 whose kernels are known, under a driver that takes notes."""
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    runtime = Runtime()
    monkeypatch.setattr(driver, "_library", lambda: library)
    monkeypatch.setattr(compiler, "function", lambda key, device, stream: 77 + device)
    monkeypatch.setattr(compiler, "capability", lambda device: 90)
    monkeypatch.setattr(plan, "_runtime", lambda: runtime)
    monkeypatch.setattr(cupy.cuda, "runtime", runtime)
    ctypes.c_int.in_dll(library, "record_bytes").value = ctypes.sizeof(plan.AdvanceRingParams)
    ctypes.c_int.in_dll(library, "statuses_left").value = 0
    return runtime


def a_plan(device: int = 0, **more: Any) -> plan.Plan:
    record = plan.AdvanceRingParams(ring_start=4096, batch=3)
    where = Device("cuda", device)
    return plan.Plan(AdvanceRingKey(), (5, 6, 7), (32, 2, 1), record, where, 1024, **more)


def seen(library: ctypes.CDLL) -> list[int]:
    return list((ctypes.c_longlong * 13).in_dll(library, "seen"))


def test_structures_are_the_drivers(library):
    config, attribute = driver.LaunchConfig, driver.LaunchAttribute
    assert list((ctypes.c_int * 6).in_dll(library, "layout")) == [
        ctypes.sizeof(attribute), attribute.value.offset, ctypes.sizeof(config),
        config.stream.offset, config.attributes.offset, config.num_attributes.offset,
    ]  # fmt: skip


def test_a_dependent_launch(library, runtime):
    one = a_plan(pdl=True)
    one.launch(1234)
    shape = [5, 6, 7, 32, 2, 1, 1024]
    assert seen(library) == [*shape, 1234, 1, 6, 1, 77, 0]
    size = ctypes.sizeof(one.record)
    record = (ctypes.c_ubyte * 4096).in_dll(library, "record")
    assert bytes(record)[:size] == bytes(one.record)
    one.record.batch = 9  # a record that is refilled is launched with its new content
    one.launch(4321)
    assert seen(library) == [*shape, 4321, 1, 6, 1, 77, 0]
    assert plan.AdvanceRingParams.from_buffer_copy(bytes(record)[:size]).batch == 9
    assert not runtime.calls


@pytest.fixture
def plain(monkeypatch) -> list[tuple[int, ...]]:
    """What CuPy's driver is told."""
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    told: list[tuple[int, ...]] = []

    class Driver:
        @staticmethod
        def launchKernel(*arguments: int) -> None:  # noqa: N802  # CuPy's name
            record = ctypes.c_void_p.from_address(arguments[9]).value
            told.append((*arguments[:9], record, arguments[10]))

    monkeypatch.setattr(cupy.cuda, "driver", Driver)
    return told


def test_a_plain_launch(runtime, plain):
    one = a_plan()
    one.launch(1234)
    assert plain == [(77, 5, 6, 7, 32, 2, 1, 1024, 1234, ctypes.addressof(one.record), 0)]


def test_dependent_launches_need_compute_capability_90(runtime, plain, monkeypatch):
    monkeypatch.setattr(compiler, "capability", lambda device: 89)
    a_plan(pdl=True).launch(8)
    assert len(plain) == 1


def test_the_device_of_the_plan_is_current_during_the_launch(library, runtime, plain):
    one = a_plan(1)
    for _ in range(2):
        one.launch(0)
    assert runtime.calls == [1, 0, 1, 0]
    assert [told[0] for told in plain] == [78, 78]


@pytest.mark.parametrize("count", [1, 2])
def test_the_current_device_is_asked_for_where_there_are_several(runtime, plain, count):
    runtime.count, one = count, a_plan()
    one.launch(0)
    asked = runtime.asked
    for _ in range(3):
        one.launch(0)
    assert runtime.asked - asked == (3 if count > 1 else 0)
    assert len(plain) == 4
    assert one.copy().ready is None  # a copy finds out by itself


@pytest.mark.parametrize("status", [1, driver.INVALID_CONTEXT])
def test_errors_of_the_driver(library, runtime, status):
    ctypes.c_int.in_dll(library, "status").value = status
    ctypes.c_int.in_dll(library, "statuses_left").value = 5
    with pytest.raises(ReplaySSMError) as caught:
        a_plan(pdl=True).launch(0)
    assert str(caught.value) == (
        "launching advance_ring with grid (5, 6, 7) and block (32, 2, 1) failed: "
        "CUDA_ERROR_TESTED: as planted"
    )


def test_a_thread_without_a_context_gets_one(library, runtime):
    ctypes.c_int.in_dll(library, "status").value = driver.INVALID_CONTEXT
    ctypes.c_int.in_dll(library, "statuses_left").value = 1
    a_plan(pdl=True).launch(99)
    assert runtime.calls == [0]
    assert seen(library)[7] == 99


def test_a_machine_without_a_driver(monkeypatch):
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    driver._library.cache_clear()
    with pytest.raises(ReplaySSMError, match=r"^the NVIDIA driver cannot be used \(.*\): install"):
        driver._library()


def test_copies_of_a_plan_have_records_of_their_own():
    one = a_plan(pdl=True)
    one.ready = lambda stream: None
    two = one.copy()
    two.record.batch = 8
    assert (one.record.batch, two.ready, two.pdl, two.grid) == (3, None, True, one.grid)


# --- How a step is spread over a GPU --------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "tokens", "heads"), [(128, 1, 2), (160, 1, 4), (192, 1, 2), (256, 1, 4), (128, 4, 4)]
)
def test_items_of_codes(batch, tokens, heads):
    """Two heads or four, as was faster on an H200: rounds of the warps, and what each costs."""
    step = Step(batch, 64, 8, 64, tokens, 16, 16 + tokens, False)
    h200 = Processor(132, 227 << 10)
    launch = schedule("float8_e4m3fn", "bfloat16", 128, step, h200)
    assert launch.fields["heads_of_item"] == heads


@pytest.mark.parametrize(
    ("state", "dstate", "tokens", "few", "many"),
    [
        ("float32", 128, 1, 49, 50),
        ("float32", 256, 1, 24, 25),
        ("float16", 128, 1, 66, 67),
        ("int8", 128, 1, 33, 34),
        ("int8", 64, 1, 33, 34),
        ("float32", 128, 4, 8, 9),
    ],
)
def test_few_heads_have_a_form_of_their_own(state, dstate, tokens, few, many):
    for batch, small in ((few, True), (many, False)):
        step = Step(batch, 64, 8, 64, tokens, 16, 16 + tokens, False)
        key = schedule(state, "bfloat16", dstate, step, Processor(132, 227 << 10)).key
        assert (type(key) is not CheckpointingSsuKey) == small


@pytest.mark.parametrize(
    ("state", "batch", "tokens", "flags", "warps", "tight"),
    [
        ("float32", 32, 4, 0, 8, 1),
        ("float32", 128, 4, 0, 7, 0),
        ("float32", 32, 4, SmallFlag.WIDE_OUT, 7, 0),
        ("float32", 128, 1, 0, 8, 0),
        ("bfloat16", 32, 4, 0, 10, 0),
    ],
)
def test_rows_are_tight_where_that_makes_room_for_a_warp(state, batch, tokens, flags, warps, tight):
    step = Step(batch, 64, 8, 64, tokens, 16, 16 + tokens, False, flags=int(flags))
    launch = schedule(state, "bfloat16", 128, step, Processor(132, 227 << 10))
    assert (launch.threads // 32, launch.fields["tight_rows"]) == (warps, tight)


@pytest.mark.parametrize(
    ("state", "batch", "early"),
    [("float32", 128, 16), ("bfloat16", 128, 49), ("bfloat16", 96, 0), ("int8", 128, 0)],
)
def test_warps_know_the_items_of_the_first_sequences(state, batch, early):
    """Where those of sequences that flush have as many heads as the others."""
    step = Step(batch, 64, 8, 64, 1, 16, 17, False)
    launch = schedule(state, "bfloat16", 128, step, Processor(132, 227 << 10))
    assert launch.fields.get("early_sequences", 0) == early
    assert early * launch.fields["items_of_sequence"] <= launch.grid[0] * (launch.threads // 32)


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("state", ["float32", "int8", "float16+fp8"])
def test_what_a_schedule_sets_are_fields(state, tokens):
    """ctypes takes any name, and the kernel would read what nobody has written."""
    keys = [*replay_keys(state, "bfloat16", 128, tokens)]
    keys += [key for key in [two_kernel_key(state, "bfloat16", 128, tokens)] if key is not None]
    fields = {name for name, _ in plan.CheckpointingSsuParams._fields_}
    for key in keys:
        assert {*typical(key, 227 << 10).fields} <= fields


@pytest.mark.parametrize(
    ("state_dtype", "batch", "tokens", "flags", "plain"),
    [
        ("float32", 1, 1, SmallFlag.HAS_SLOTS, True),
        ("float32", 8, 1, SmallFlag.HAS_SLOTS, True),
        ("bfloat16", 1, 1, SmallFlag.HAS_SLOTS | SmallFlag.WIDE_DT | SmallFlag.SOFTPLUS, True),
        ("bfloat16", 8, 1, SmallFlag.HAS_SLOTS, True),  # several rows a lane
        ("bfloat16", 1, 2, SmallFlag.HAS_SLOTS, False),
        ("bfloat16", 1, 1, 0, False),
        ("bfloat16", 1, 1, SmallFlag.HAS_SLOTS | SmallFlag.GATED, False),
        ("bfloat16", 1, 1, SmallFlag.HAS_SLOTS | SmallFlag.SLOTS_INT64, False),
        ("bfloat16", 1, 1, SmallFlag.HAS_SLOTS | SmallFlag.PACKED, False),
        ("bfloat16", 1, 1, SmallFlag.HAS_SLOTS | SmallFlag.FORCED_FLUSHES, False),
    ],
)
def test_plain_steps_have_an_instance(state_dtype, batch, tokens, flags, plain):
    step = Step(batch, 64, 8, 64, tokens, 16, 16 + tokens, False, flags=int(flags))
    key = schedule(state_dtype, "bfloat16", 128, step, Processor(132, 227 << 10)).key
    assert (type(key) is PlainCheckpointingSsuKey) == plain
    longer = replace(step, ring_buffer_len=40)  # its rows go by what is live
    key = schedule(state_dtype, "bfloat16", 128, longer, Processor(132, 227 << 10)).key
    assert type(key) is not PlainCheckpointingSsuKey
