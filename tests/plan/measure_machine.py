#!/usr/bin/env python3
"""measure_machine.py SOURCE_FOLDER PLAN_A_JOB: bench/measure_machine.py with a stand-in for PyTorch and its GPU: products are
timed without their calls and out of the cache, and plan_a_job finds the GPU's figures again.
"""
import contextlib
import io
import json
import pathlib
import subprocess
import sys
import tempfile
import types
import unittest

SOURCES, PLANNER = pathlib.Path(sys.argv[1]), sys.argv[2]
sys.path.insert(0, str(SOURCES / "bench"))
import measure_machine as bench  # noqa: E402

CACHE, CALL, LAUNCH, EFFICIENCY = 50 << 20, 24e-6, 3e-6, 0.625
WAVE, PEAK, COPY_RATE = 132 * 128 * 256, 989e12, 4e12


class Tensor:
    def __init__(self, *shape, dtype=2, **_):
        shape = shape[0] if isinstance(shape[0], tuple) else shape
        self.shape, self.size = shape, dtype
        for extent in shape:
            self.size *= extent

    def numel(self):
        return self.size

    def copy_(self, other):
        GPU.run(2 * other.size / COPY_RATE)


class GPU:
    """Runs what is enqueued in order. A call takes the host CALL, a captured one nothing. Operands in the cache halve times."""
    host = device = 0.0
    captured = None
    cached = {}  # by age: bytes of tensors touched
    calls_before_capture = 0

    @classmethod
    def run(cls, seconds):
        cls.host += CALL
        cls.device = max(cls.device, cls.host) + seconds

    @classmethod
    def touched(cls, tensors):
        """Were they in the cache?"""
        hit = any(id(t) in cls.cached for t in tensors)
        for t in tensors:
            cls.cached.pop(id(t), None)
            cls.cached[id(t)] = t.size
        while sum(cls.cached.values()) > CACHE and len(cls.cached) > 1:
            cls.cached.pop(next(iter(cls.cached)))
        return hit

    @classmethod
    def matmul(cls, a, b, out):
        (m, k), n = a.shape, b.shape[1]
        assert b.shape == (k, n) and out.shape == (m, n)
        if cls.captured is not None:
            assert cls.calls_before_capture > 0
            cls.captured.append((a, b, out))
        else:
            cls.calls_before_capture += 1
            cls.run(cls.seconds(a, b, out))

    @classmethod
    def seconds(cls, a, b, out):
        (m, k), n = a.shape, b.shape[1]
        seconds = LAUNCH + 2 * k * (m * n + WAVE / 2) / (PEAK * EFFICIENCY)
        return seconds / 2 if cls.touched((a, b, out)) else seconds


class Event:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = GPU.device = max(GPU.device, GPU.host)

    def synchronize(self):
        GPU.host = max(GPU.host, self.at)

    def elapsed_time(self, end):
        assert GPU.host >= end.at, "read before it was waited for"
        return 1e3 * (end.at - self.at)


class Graph:
    def replay(self):
        GPU.host += CALL
        GPU.device = max(GPU.device, GPU.host)
        for product in self.products:
            GPU.device += GPU.seconds(*product)


@contextlib.contextmanager
def capture(graph):
    graph.products = GPU.captured = []
    yield
    GPU.captured = None


class Stream:
    def wait_stream(self, other):
        pass


CUDA = types.SimpleNamespace(
    is_available=lambda: True, device_count=lambda: 1, Event=Event, CUDAGraph=Graph, graph=capture, Stream=Stream,
    current_stream=Stream, stream=contextlib.nullcontext,
    synchronize=lambda: Event(True).record() or setattr(GPU, "host", max(GPU.host, GPU.device)),
    get_device_properties=lambda _: types.SimpleNamespace(name="a stand-in", total_memory=140 << 30, L2_cache_size=CACHE,
                                                          multi_processor_count=132))
TORCH = types.SimpleNamespace(cuda=CUDA, randn=Tensor, empty=Tensor, empty_like=lambda t: Tensor(*t.shape, dtype=1),
                              matmul=GPU.matmul, bfloat16=2, uint8=1)


class Measured(unittest.TestCase):
    def test_times_are_the_devices(self):
        for m, n, k in ((1024, 768, 768), (16384, 8192, 8192)):
            GPU.calls_before_capture = 0
            truth = LAUNCH + 2 * k * (m * n + WAVE / 2) / (PEAK * EFFICIENCY)
            self.assertAlmostEqual(bench.product_seconds(TORCH, m, n, k, CACHE, 1) / truth, 1, delta=1e-9)

    def test_graphs_are_long_and_buffers_do_not_fit_the_cache(self):
        for m, n, k in bench.SHAPES:
            buffers = bench.buffers_of(TORCH, m, n, k, CACHE)
            self.assertGreaterEqual(len(buffers), 2)
            self.assertGreater(sum(t.size for one in buffers for t in one), 4 * CACHE)
        graphs = []
        made, CUDA.CUDAGraph = CUDA.CUDAGraph, lambda: graphs.append(Graph()) or graphs[-1]
        self.addCleanup(setattr, CUDA, "CUDAGraph", made)
        bench.product_seconds(TORCH, 1024, 768, 768, CACHE, 1)
        self.assertGreater(len(graphs[0].products) * 2 * 1024 * 768 * 768 / PEAK, 1e-3)

    def test_the_planner_finds_the_gpu_again(self):
        sys.modules["torch"] = TORCH
        with tempfile.TemporaryDirectory() as folder:
            out, plan = (pathlib.Path(folder) / name for name in ("machine.json", "plan.json"))
            sys.argv = ["measure_machine.py", "--out", str(out), "--repeats", "3"]
            with contextlib.redirect_stdout(io.StringIO()) as said:
                bench.main()
            measured = json.loads(out.read_text(encoding="utf-8"))
            self.assertAlmostEqual(measured["memory_bandwidth"] / COPY_RATE, 1, delta=0.01)
            self.assertIn("a stand-in: products up to ", said.getvalue())
            done = subprocess.run([PLANNER, "--machine", out, "--gpus", "1", "--model", "gpt2-124m", "--report", plan],
                                  capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stderr)
            machine = json.loads(plan.read_text(encoding="utf-8"))["machine"]
        self.assertAlmostEqual(machine["launch_seconds"] / LAUNCH, 1, delta=1e-6)
        self.assertAlmostEqual(machine["product_efficiency"] / EFFICIENCY, 1, delta=1e-6)
        self.assertEqual(machine["memory_efficiency"], 1)
        self.assertIn("launch of a kernel              3 us", done.stdout)


    def test_what_cannot_be_written_is_refused_before_anything_is_measured(self):
        sys.modules["torch"] = TORCH
        with tempfile.TemporaryDirectory() as folder:
            for out in (folder, folder + "/none/machine.json"):
                sys.argv, before = ["measure_machine.py", "--out", out], GPU.host
                with self.assertRaises(SystemExit) as refused:
                    bench.main()
                self.assertIn(f"--out: '{out}' cannot be written", str(refused.exception))
                self.assertEqual(GPU.host, before)


unittest.main(argv=["measure_machine"])
