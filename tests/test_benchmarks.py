"""The parts of the benchmarks that need no GPU: the workload, the byte model, tables and plots."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import replayssm_cupy as ssm
from replayssm_cupy import plan

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))

import bench  # noqa: E402
import host_side  # noqa: E402
import peers  # noqa: E402
import report  # noqa: E402
import snapshots  # noqa: E402
import steps  # noqa: E402
import workload  # noqa: E402
from workload import Acceptance, Shape  # noqa: E402

SHAPE = Shape(nheads=4, ngroups=2, head_dim=64, dstate=128, window=16)
GEOMETRIC = Acceptance("geometric:0.7")


# --- Acceptance ----------------------------------------------------------------------------------


def test_truncated_geometric():
    """Drafts are accepted one after another: 1 + the drafts before the first rejection."""
    assert GEOMETRIC.probabilities(1).tolist() == [1]
    expected = [0.3, 0.7 * 0.3, 0.7**2 * 0.3, 0.7**3]
    np.testing.assert_allclose(GEOMETRIC.probabilities(4), expected)
    rng = np.random.default_rng(1)
    drafts = 1 + np.cumprod(rng.random((100_000, 3)) < 0.7, axis=1).sum(1)
    counts = np.bincount(drafts, minlength=5)[1:] / len(drafts)
    np.testing.assert_allclose(GEOMETRIC.probabilities(4), counts, atol=0.006)
    assert Acceptance("geometric:0").mean(4) == 1
    assert Acceptance("geometric:1").mean(4) == 4


def test_histogram(tmp_path):
    path = tmp_path / "accepted.csv"
    path.write_text("accepted,count\n1,10\n2,5\n\n4,25\n2,5\n")
    acceptance = Acceptance(str(path))
    np.testing.assert_allclose(acceptance.probabilities(6), [10 / 45, 10 / 45, 0, 25 / 45, 0, 0])
    np.testing.assert_allclose(acceptance.probabilities(2), [10 / 45, 35 / 45])
    assert acceptance.mean(6) == pytest.approx((10 + 20 + 100) / 45)
    drawn = acceptance.draw(np.random.default_rng(0), 20_000, 6)
    counts = np.bincount(drawn, minlength=7)[1:] / len(drawn)
    np.testing.assert_allclose(counts, acceptance.probabilities(6), atol=0.02)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("1,2\n0,3\n", r"^acceptance: expected lines .*, got \['0', '3'\] in line 2 of "),
        ("1,-2\n", "^acceptance: expected lines "),
        ("1,nan\n", "^acceptance: expected lines "),
        ("1\n", "^acceptance: expected lines "),
        ("accepted,count\nx,1\n", "^acceptance: expected lines "),
        ("", "^acceptance: expected a histogram in .*, got nothing$"),
        ("1,0\n", "^acceptance: expected a histogram in .*, got nothing$"),
    ],
)
def test_bad_histograms(tmp_path, content, message):
    path = tmp_path / "accepted.csv"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        Acceptance(str(path))


@pytest.mark.parametrize("text", ["geometric:", "geometric:1.5", "geometric:x", "geometric:-0.1"])
def test_bad_geometric(text):
    with pytest.raises(ValueError, match=f"^acceptance: expected geometric:P .*, got '{text}'$"):
        Acceptance(text)


# --- Cursors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 4, 16])
def test_advance_is_the_librarys(tokens):
    rng = np.random.default_rng(tokens)
    rows, window = SHAPE.window + tokens, SHAPE.window
    prev = rng.integers(0, window + 1, 200).astype(np.int32)
    start = rng.integers(0, rows, 200).astype(np.int32)
    accepted = rng.integers(1, tokens + 1, 200).astype(np.int32)
    moved = workload.advance(prev, start, accepted, tokens, window, rows)
    ssm.advance_ring(start, prev, accepted, tokens, max_window=window, ring_buffer_len=rows)
    assert np.array_equal(moved[0], prev) and np.array_equal(moved[1], start)


def test_steady_cursors_are_spread_over_the_cycle():
    """With one token every row 1 to 16 is as likely, and one sequence in sixteen flushes."""
    rng = np.random.default_rng(5)
    prev, start = workload.steady_cursors(8192, 1, SHAPE, GEOMETRIC, rng)
    counts = np.bincount(prev, minlength=17)
    assert counts[0] == 0 and len(counts) == 17
    np.testing.assert_allclose(counts[1:], 8192 / 16, rtol=0.25)
    assert start.min() == 0 and start.max() == 16 and len(set(start.tolist())) == 17
    assert prev.dtype == start.dtype == np.int32


@pytest.mark.parametrize("tokens", [1, 4])
def test_share_of_flushes_is_the_long_run_average(tokens):
    """A step accepts mean(T) tokens and a flush folds what was there: shares must balance."""
    rng = np.random.default_rng(6)
    prev, _ = workload.steady_cursors(8192, tokens, SHAPE, GEOMETRIC, rng)
    share = (prev + tokens > SHAPE.window).mean()
    follow, flushed, total = np.zeros(64, np.int32), 0, 0
    where = np.zeros(64, np.int32)
    for step in range(3000):
        if step >= 500:
            flushed += int((follow + tokens > SHAPE.window).sum())
            total += 64
        accepted = GEOMETRIC.draw(rng, 64, tokens)
        follow, where = workload.advance(follow, where, accepted, tokens, 16, 16 + tokens)
    assert share == pytest.approx(flushed / total, abs=0.015)


def test_a_cycle_flushes_each_sequence_once():
    rng = np.random.default_rng(7)
    first = workload.steady_cursors(50, 1, SHAPE, GEOMETRIC, rng)
    phases = list(workload.cycle(first, 1, SHAPE, GEOMETRIC, rng))
    assert len(phases) == SHAPE.window
    assert np.array_equal(phases[0][0], first[0])
    flushes = sum((prev + 1 > SHAPE.window).astype(int) for prev, _ in phases)
    assert (flushes == 1).all()


# --- Bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", workload.STATE_BYTES)
@pytest.mark.parametrize("tokens", [1, 4])
def test_bytes_are_those_of_the_arrays(dtype, tokens):
    """Counted on a stack's own arrays: what a step of each sequence touches."""
    batch, rng = 5, np.random.default_rng(8)
    stack = ssm.LayerStack(
        1, batch, SHAPE.nheads, SHAPE.head_dim, SHAPE.ngroups, SHAPE.dstate,
        max_window=16, npredicted=tokens, state_dtype=dtype, device="cpu",
    )  # fmt: skip
    prev = np.array([0, 3, 12, 13, 16], np.int32)
    x = np.zeros((batch, tokens, SHAPE.nheads, SHAPE.head_dim), stack.x_caches[0].dtype)
    B = np.zeros((batch, tokens, SHAPE.ngroups, SHAPE.dstate), x.dtype)
    dt = np.zeros((batch, tokens, SHAPE.nheads), np.float32)
    out = stack.step(0, x, dt, -np.ones(SHAPE.nheads, np.float32), B, B)
    read = written = flushes = 0
    for slot in range(batch):
        carried = stack.states[0][slot].nbytes if stack.state_copies else 0
        state = (stack.state_copies or stack.states)[0][slot].nbytes
        state += stack.state_scales[0][slot].nbytes if stack.state_scales else 0
        rings = (stack.x_caches[0], stack.B_caches[0], stack.dt_caches[0])
        row = sum(ring[slot][:, 0].nbytes for ring in rings)
        read += state + x[slot].nbytes + 2 * B[slot].nbytes + dt[slot].nbytes + prev[slot] * row
        written += out[slot].nbytes + tokens * row
        if prev[slot] + tokens > 16:
            read += carried
            written += state + carried
            flushes += 1
    moved = workload.traffic(SHAPE, dtype, tokens, prev)
    assert (moved.read, moved.written, moved.flushes) == (read, written, flushes)
    assert moved.total == read + written
    assert flushes == {1: 1, 4: 2}[tokens]
    assert rng is not None


def test_states_are_several_times_the_l2():
    for batch in (1, 8, 32, 256):
        layers = steps.layers_of(Shape(), "float32", batch)
        bytes_ = layers * batch * Shape().state_bytes("float32")
        assert layers >= 3
        assert bytes_ >= steps.BYTES_OF_CACHES or layers == steps.MOST_LAYERS


def test_a_cycle_is_the_mean_of_its_phases():
    parts = [workload.Traffic(10, 4, 1), workload.Traffic(20, 8, 2)]
    assert steps._mean(parts) == workload.Traffic(15, 6, 1.5)


class Clock:
    """A graph whose time is that of its cursors."""

    def __init__(self) -> None:
        self.us = 0.0

    def time(self, repeats: int) -> float:
        return self.us

    def set_cursors(self, prev: float, start: float) -> None:
        self.us = prev + start


def test_times_are_averaged_over_the_phases():
    one, two = Clock(), Clock()
    two.us = 7.0
    timed = {"replay_us": (one, one.set_cursors), "plain_us": (two, None)}
    assert steps._times(timed, [(1.0, 0.5), (3.0, 0.5)]) == {"replay_us": 2.5, "plain_us": 7.0}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_the_kernels_of_the_ceilings_compile(arch):
    """And the loads and stores that are timed are there, 16 bytes each, none optimised away."""
    import timing

    pytest.importorskip("cupy", reason="CuPy is not installed")
    from cupy_backends.cuda.libs import nvrtc

    try:
        program = nvrtc.createProgram(timing.CEILINGS, "ceilings.cu", (), ())
    except Exception as error:
        pytest.skip(f"NVRTC is missing ({error})")
    nvrtc.compileProgram(program, (f"-arch=compute_{arch[3:]}",))
    _, read, flush = nvrtc.getPTX(program).decode().split(".entry ")
    nvrtc.destroyProgram(program)
    names = [part.split("(")[0] for part in (read, flush)]
    if names[0] == "flush_first":
        read, flush = flush, read
    assert len(re.findall(r"ld\.global\S*\.v4", read)) == 16
    assert len(re.findall(r"ld\.global\S*\.v4", flush)) == 8
    assert len(re.findall(r"st\.global\.L2::cache_hint\.v4\.b32", flush)) == 8
    assert "evict_last" in flush
    assert f".minnctapersm {timing.BLOCKS}" in flush, "blocks that start late would write late"


# --- Reports -------------------------------------------------------------------------------------


def rows(**more: object) -> list[dict[str, object]]:
    return [
        {
            "shape": "64/8/64/128", "state": state, "tokens": tokens, "batch": batch,
            "replay_us": 2.25, "plain_us": 4.0, **more, "floor_us": 1.5, "flush_first_us": 1.75,
            "percent": 10.0 * batch + tokens, "flush_first_percent": 77.8, "bytes_read": 5,
            "layers": 3, "gpu": "a GPU",
        }
        for state in ("float32", "int8") for tokens in (1, 4) for batch in (4, 1)
    ]  # fmt: skip


def test_table():
    row = rows(flashinfer_us=3.0, mamba_ssm_us=None)[0]
    heads = report.columns([row])
    assert report.header(heads).split("\n")[0] == (
        "| shape | state | T | batch | replay us | plain us | floor us | flush-first us "
        "| floor / replay | flush-first / replay | flashinfer us | mamba_ssm us |"
    )
    assert report.line(row, heads) == (
        "| 64/8/64/128 | float32 | 1 | 4 | 2.2 | 4.0 | 1.5 | 1.8 | 41 % | 78 % | 3.0 | - |"
    )
    text = report.markdown([row], {"gpu": "a GPU", "commit": "abc"}, ["a note"])
    assert text.startswith("gpu a GPU, commit abc\n\na note\n\n| shape ")
    assert text.count("\n|") == 3


def test_csv_and_curves(tmp_path):
    path = str(tmp_path / "rows.csv")
    report.write_csv(path, rows(mamba_ssm_us=None))
    back = report.read_csv(path)
    assert [row["mamba_ssm_us"] for row in back] == [""] * 8
    assert report.curves(back) == report.curves(rows())
    assert report.curves(back)["int8, T = 4"] == [(1, 14.0), (4, 44.0)]
    assert report.line(back[0], report.columns(back)).endswith("| 41 % | 78 % | - |")


def test_curves_of_several_shapes():
    both = [*rows(), *({**row, "shape": "8/1/64/128"} for row in rows())]
    found = report.curves(both)
    assert len(found) == 8
    assert found["8/1/64/128, int8, T = 4"] == found["64/8/64/128, int8, T = 4"]


def test_plot_from_a_csv(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    table, image = tmp_path / "rows.csv", tmp_path / "figure.png"
    report.write_csv(str(table), rows())
    assert bench.main(["plot", str(table), str(image)]) == 0
    content = image.read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) > 10_000


def test_plot_without_matplotlib(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    report.write_csv(str(tmp_path / "rows.csv"), rows())
    assert bench.main(["plot", str(tmp_path / "rows.csv"), "figure.png"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: plots need matplotlib (") and message.count("\n") == 1
    assert "pip install 'replayssm_cupy[bench]'" in message


def test_plot_of_another_file(tmp_path, capsys):
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n")
    assert bench.main(["plot", str(tmp_path / "rows.csv"), "figure.png"]) == 2
    assert (
        "expected columns batch, percent, shape, state, tokens, got a, b" in capsys.readouterr().err
    )


# --- The command line ----------------------------------------------------------------------------


def test_defaults_and_options():
    args = bench.parser().parse_args(["decode"])
    assert (args.dtypes, args.tokens, args.acceptance) == (
        ["float32", "bfloat16"], [1, 4], "geometric:0.7",
    )  # fmt: skip
    assert [Shape(*sizes, args.window) for sizes in args.shapes] == [Shape()]
    words = "decode --shapes 64/8/80/128,128/1/64/256 --batches 3,5 --cycle --pdl"
    words += " --algorithm two-kernel --peer mamba_ssm --peer flashinfer"
    args = bench.parser().parse_args(words.split())
    assert args.shapes == [[64, 8, 80, 128], [128, 1, 64, 256]]
    assert (args.batches, args.cycle, args.pdl) == ([3, 5], True, True)
    assert (args.algorithm, args.peer) == ("two-kernel", ["mamba_ssm", "flashinfer"])


@pytest.mark.parametrize(
    "words",
    [["--dtypes", "float64"], ["--tokens", "0"], ["--batches", "a"], ["--peer", "triton"],
     ["--algorithm", "three"], ["--shapes", "64/8/64"], ["--shapes", "64/0/64/128"]],
)  # fmt: skip
def test_wrong_options(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.parser().parse_args(["decode", *words])
    assert stopped.value.code == 2
    assert f"argument {words[0]}: " in capsys.readouterr().err


@pytest.mark.parametrize("name", peers.PEERS)
def test_a_peer_that_is_not_there(name, monkeypatch):
    monkeypatch.setitem(
        sys.modules, {"flashinfer": "flashinfer", "mamba_ssm": "mamba_ssm"}[name], None
    )
    with pytest.raises(
        ImportError, match=rf"^peer {name}: .* cannot be imported \(.+\)$"
    ) as caught:
        peers.find_peer(name)
    assert "\n" not in str(caught.value)


def test_a_flashinfer_from_before_the_rings(monkeypatch):
    from types import ModuleType

    module = ModuleType("flashinfer.mamba")
    module.checkpointing_ssu = lambda state, old_x: None
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.mamba", module)
    with pytest.raises(ImportError, match=r"^peer flashinfer: .* needs FlashInfer 0\.7\.4$"):
        peers.find_peer("flashinfer")
    module.checkpointing_ssu = lambda state, ring_start: None
    assert callable(peers.find_peer("flashinfer"))


def a_case(dtype: str, tokens: int) -> peers.Case:
    rng = np.random.default_rng(9)
    cursors = workload.steady_cursors(3, tokens, SHAPE, GEOMETRIC, rng)
    return peers.Case(SHAPE, dtype, tokens, 3, 2, *cursors, rng.permutation(3).astype(np.int32))


@pytest.mark.parametrize("dtype", workload.STATE_BYTES)
@pytest.mark.parametrize("tokens", [1, 4])
def test_what_flashinfer_is_given(dtype, tokens, monkeypatch):
    """The contract is this library's own, which looks at every argument."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    monkeypatch.setattr(peers, "DEVICE", "cpu")
    given: list[dict[str, object]] = []

    def checkpointing_ssu(*arrays, **more):
        given.append(more)
        return ssm.checkpointing_ssu(*arrays, **more)

    case = a_case(dtype, tokens)
    launches = peers._flashinfer(checkpointing_ssu, case)
    if dtype in workload.COPIED:
        assert launches is None  # it has no such format
        return
    assert len(launches.calls) == case.layers
    for call in launches.calls:
        out = call()
        assert torch.isfinite(out.float()).all() and (out != 0).any()
    assert given[0]["dt"].stride()[2:] == (1, 0)
    assert given[0]["D"].stride() == (1, 0)
    assert ("cb_scaled" in given[0]) == (dtype not in workload.SCALED)
    launches.set_cursors(np.full(3, 17, np.int32), case.start)  # more than W: seen by the call
    with pytest.raises(ValueError, match=r"^prev_num_accepted_tokens: expected values from 0"):
        launches.calls[0]()


def test_what_mamba_ssm_is_given(monkeypatch):
    pytest.importorskip("torch", reason="torch is not installed")
    monkeypatch.setattr(peers, "DEVICE", "cpu")
    assert peers._mamba_ssm(None, a_case("bfloat16", 4)) is None
    assert peers._mamba_ssm(None, a_case("int8", 1)) is None
    for dtype in ("float32", "bfloat16"):
        launches = peers._mamba_ssm(ssm.selective_state_update, a_case(dtype, 1))
        assert launches is not None
        assert tuple(launches.calls[0]().shape) == (3, SHAPE.nheads, SHAPE.head_dim)


class Counted:
    """A graph that runs its launches once and takes a microsecond for each."""

    def __init__(self, launches) -> None:
        self.number = len(launches)
        for launch in launches:
            launch()

    def time(self, repeats: int) -> float:
        return float(self.number)


@pytest.fixture
def numpy_for_cupy(monkeypatch) -> SimpleNamespace:
    """As much of CuPy as the benchmarks use, on NumPy's memory: work is done at once, and a graph
    only counts. `free` is the GPU's free memory, of which every replay takes `leak` bytes."""
    state = SimpleNamespace(free=1000, leak=0, replays=0)

    class Graph:
        def launch(self, stream: object) -> None:
            state.replays += 1
            state.free -= state.leak

    class Stream(contextlib.nullcontext):
        def __init__(self, non_blocking: bool) -> None:
            super().__init__()

        def synchronize(self) -> None:
            pass

        def begin_capture(self) -> None:
            pass

        def end_capture(self) -> Graph:
            return Graph()

    class Event:
        def record(self, stream: object) -> None:
            self.at = state.replays

        def synchronize(self) -> None:
            pass

    cuda = SimpleNamespace(
        Device=lambda: SimpleNamespace(synchronize=lambda: None),
        Stream=Stream,
        Event=Event,
        get_elapsed_time=lambda start, end: (end.at - start.at) / 500,
        runtime=SimpleNamespace(memGetInfo=lambda: (state.free, 5000)),
    )
    pool = SimpleNamespace(used_bytes=lambda: 7, total_bytes=lambda: 9)
    names = {
        name: getattr(np, name)
        for name in ("asarray", "broadcast_to", "exp", "full", "resize", "zeros")
    }
    fake = SimpleNamespace(
        **names, cuda=cuda, ndarray=np.ndarray, get_default_memory_pool=lambda: pool
    )
    monkeypatch.setitem(sys.modules, "cupy", fake)
    on_cpu = ssm.LayerStack

    def make(*arguments: object, **more: object) -> ssm.LayerStack:
        return on_cpu(*arguments, **(more | {"device": "cpu"}))

    make.from_arrays = on_cpu.from_arrays
    monkeypatch.setattr(ssm, "LayerStack", make)
    return state


def test_time_of_a_graph(numpy_for_cupy):
    """Two microseconds a replay by the clock, over the launches in it."""
    import timing

    calls: list[int] = []
    replay = timing.Replay([lambda: calls.append(0)] * 4)
    assert len(calls) == 2 + 4  # warm-up and capture
    assert replay.time(5) == pytest.approx(2 / 4)
    assert numpy_for_cupy.replays == 5


@pytest.mark.parametrize("leak", [0, 8])
def test_memory(numpy_for_cupy, leak, capsys):
    numpy_for_cupy.leak = leak
    assert bench.main(["memory", "--steps", "3"]) == (1 if leak else 0)
    printed = capsys.readouterr().out
    assert f"after 3 eager steps: {4000 + leak} bytes in use on the GPU, pool 7 used" in printed
    assert numpy_for_cupy.replays == 1 + 3
    assert printed.endswith("memory changed\n" if leak else "memory stays the same\n")


def test_host(numpy_for_cupy, monkeypatch, capsys):
    """With a torch that has no GPU: a line, and CuPy's times."""

    def no_torch() -> None:
        raise ImportError("torch finds no CUDA device")

    monkeypatch.setattr(host_side, "_torch_calls", no_torch)
    monkeypatch.setattr(host_side, "first_call", lambda: None)
    monkeypatch.setattr(
        host_side, "host_times_of", lambda calls, synchronize: {
            name: 1.5 if call() is None else 2.5 for name, call in calls.items()
        },
    )  # fmt: skip
    assert bench.main(["host"]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert first == "torch tensors: torch finds no CUDA device"
    assert others == [
        "host time of one eager stack.step with CuPy arrays: 2.5 us",
        "host time of one eager stack.step that allocates out with CuPy arrays: 2.5 us",
        "host time of one bound step with CuPy arrays: 2.5 us",
        "host time of one eager stack.advance with CuPy arrays: 1.5 us",
        "host time of one eager stack.materialize with CuPy arrays: 1.5 us",
        "host time of one eager stack.materialize_blocks with CuPy arrays: 1.5 us",
    ]


@pytest.mark.parametrize("more", [[], ["--cycle", "--pdl", "--algorithm", "two-kernel"]])
def test_decode_on_the_cpu_path(more, numpy_for_cupy, monkeypatch, tmp_path, capsys):
    """The command from end to end, with NumPy for CuPy and no clock."""
    import timing

    monkeypatch.setattr(steps, "Replay", Counted)
    monkeypatch.setattr(steps, "flush_first_time", lambda moved, layers: 3.0)
    monkeypatch.setattr(steps, "BYTES_OF_CACHES", 1)
    monkeypatch.setattr(timing, "environment", lambda: {"gpu": "none", "commit": "abc"})
    monkeypatch.setattr(timing, "read_ceiling", lambda: 1e6)
    table, text = tmp_path / "rows.csv", tmp_path / "table.md"
    words = [
        "decode",
        "--dtypes",
        "bfloat16,int8",
        "--tokens",
        "2",
        "--batches",
        "2",
        "--shapes",
        "4/2/64/128,2/2/64/64",
    ]
    assert bench.main([*words, "--csv", str(table), "--markdown", str(text), *more]) == 0
    printed = capsys.readouterr().out
    rows = report.read_csv(str(table))
    assert [(row["shape"], row["state"]) for row in rows] == [
        ("4/2/64/128", "bfloat16"), ("4/2/64/128", "int8"),
        ("2/2/64/64", "bfloat16"), ("2/2/64/64", "int8"),
    ]  # fmt: skip
    for row in rows:
        assert (row["replay_us"], row["plain_us"], row["flush_first_us"]) == ("3.0", "3.0", "3.0")
        assert row["flush_first_percent"] == "100.0"
        assert row["phases"] == ("16" if more else "1")
        assert row.get("two_kernels_us") == ("3.0" if more else None)
        floor = (int(row["bytes_read"]) + int(row["bytes_written"])) / 1e6
        assert float(row["floor_us"]) == pytest.approx(floor, abs=0.01)
        assert report.line(row, report.columns(rows)) in text.read_text()
        assert report.line(row, report.columns(rows)) in printed
    for shape in ("4 heads in 2 groups, 64 x 128, W = 16", "2 heads in 2 groups, 64 x 64, W = 16"):
        assert shape in printed


@pytest.mark.parametrize("dtype", snapshots.STATE_BYTES)
def test_snapshots_on_the_cpu_path(dtype, numpy_for_cupy, monkeypatch, capsys):
    monkeypatch.setattr(snapshots, "copy_rates", lambda: {"kernel": 4e6})
    for name, size in {"LAYERS": 2, "NHEADS": 2, "NGROUPS": 1, "BATCH": 4}.items():
        monkeypatch.setattr(snapshots, name, size)
    monkeypatch.setattr(sys, "argv", ["snapshots.py", "--dtypes", dtype, "--active", "0,2"])
    snapshots.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "copy by the kernel 4.00 TB/s, read and written"
    named = [line.split("us")[0].split()[:-1] for line in lines[1:]]
    assert named == [
        [dtype, *words.split()]
        for words in (
            "0 active prefix 8",
            "0 active plan",
            "2 active prefix 8",
            "2 active prefix 0",
            "2 active plan",
        )
    ]


def test_memory_that_grows_is_a_failure(capsys):
    same = {"after the warm-up": (5, 3, 4), "after 9 eager steps": (5, 3, 4)}
    assert host_side.report_memory(same)
    assert not host_side.report_memory(same | {"after 9 graph replays": (6, 3, 4)})
    assert capsys.readouterr().out.endswith("pool 3 used of 4\nmemory changed\n")


def test_host_times_without_launches(monkeypatch, capsys):
    pytest.importorskip("torch", reason="torch is not installed")
    ran: list[str] = []

    def times(calls, synchronize):
        for name, call in calls.items():
            assert "cpu" in plan.launchers
            call()
            ran.append(name)
        return dict.fromkeys(calls, 1.25)

    monkeypatch.setattr(host_side, "host_times_of", times)
    assert bench.main(["host", "--no-launch"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"host time of {name} without its launch: 1.2 us" for name in ran]
    assert {"one bound step", "one operator layer_step.out"} <= {*ran}
    assert "cpu" not in plan.launchers


def test_host_times_count_calls_that_take_turns():
    calls, waits = [], []
    named = {name: lambda name=name: calls.append(name) for name in "ab"}
    times = host_side.host_times_of(named, lambda: waits.append(0), 10)
    assert calls == (["a"] * 10 + ["b"] * 10) * 21 and len(waits) == 2 * 21
    assert [*times] == ["a", "b"] and all(0 < us < 1000 for us in times.values())


def test_the_layer_of_the_host_times_runs():
    """The arrays of the host benchmark, on the CPU path."""
    import ml_dtypes

    types = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
    layer = host_side._layer(lambda size, dtype: np.zeros(size, types[dtype]), np.array)
    calls = host_side._calls(*layer, np.array)
    for call in calls.values():
        call()
    assert set(calls) >= {"one eager stack.step", "one bound step", "one eager stack.advance"}


def test_the_operators_of_the_host_times_run():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    stack, inputs = host_side._layer(
        lambda size, dtype: torch.zeros(size, dtype=getattr(torch, dtype)), torch.from_numpy
    )
    calls = host_side._operator_calls(stack, inputs)
    for name, call in calls.items():
        inputs["x"].normal_()
        inputs["out"].fill_(torch.nan)
        result = call()
        out = inputs["out"] if result is None else result
        assert out.shape == inputs["x"].shape and torch.isfinite(out.float()).all(), name
