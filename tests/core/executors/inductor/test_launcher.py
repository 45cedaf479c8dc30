"""Launching a compiled library: what goes in and out, what is refused before anything runs, and what fails.

One library is compiled for the whole session, in a process of its own (`library`).
"""

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from ltc_core.executors.artifacts import WORK
from ltc_core.executors.inductor import launcher
from ltc_core.executors.inductor.launcher import Mismatch, Model
from ltc_core.graph.ir import TensorMeta
from ltc_core.native_extension import Extension
from ltc_core.settings import settings
from tests.compiled_cache import empty_cache

pytestmark = pytest.mark.timeout(
    300
)  # the first test waits for the compiler: ten seconds of a free core

BUILD = """
import sys
import torch
import torch._inductor.compile_fx as compile_fx
from pathlib import Path
from torch._guards import TracingContext, tracing
from torch._inductor import config
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from ltc_core.executors.inductor.compiler import shared_runtime

aten = torch.ops.aten
out = Path(sys.argv[1])

def step(x, m, written, strided, large, thin):
    aten.copy_.default(written, written + x.sum())
    factor = aten.linalg_cholesky_ex.default(m, check_errors=True)[0]  # through the proxy executor
    bins = aten.histc.default(x, 4, 0.0, 0.0)  # fails if x is not finite
    return factor, bins, x, strided * 2, aten.mm.default(large, large), thin + 1

mode = FakeTensorMode()
with mode:
    inputs = [
        torch.empty(4), torch.empty(3, 3), torch.empty(2, 3), torch.empty(5, 6).t(), torch.empty(400, 400),
        torch.empty(1, 3, dtype=torch.int64),
    ]
with torch.no_grad(), mode:
    module = make_fx(step)(*inputs)
options = {
    "cpp_wrapper": True,
    "compile_threads": 1,
    "aot_inductor.compile_wrapper_opt_level": "O0",
    "aot_inductor.precompile_headers": True,
    "aot_inductor.output_path": str(out / "model.so"),
}
with (
    tracing(TracingContext(mode)), V.set_fake_mode(mode), V.set_aot_compilation(True), config.patch(options),
    shared_runtime.shared(),
):
    compile_fx.compile_fx_inner(module, inputs, cpp_wrapper=True, aot_mode=True, is_inference=True)
[nodes] = out.glob("*.wrapper.json")
nodes.rename(out / "model.json")
"""


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("library")
    work = str(Path(empty_cache(tmp_path_factory.mktemp("compiled")), WORK))
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": work, "TMPDIR": work}
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(directory)], capture_output=True, text=True, env=env
    )
    assert done.returncode == 0, done.stderr
    return directory / "model.so"


def make_inputs() -> list[torch.Tensor]:
    return [
        torch.arange(4.0), 4 * torch.eye(3), torch.zeros(2, 3), torch.arange(30.0).view(5, 6).t(),
        torch.eye(400), torch.tensor([[1, 2, 3]]),
    ]  # fmt: skip


def metas() -> list[TensorMeta]:
    return [TensorMeta.like(tensor) for tensor in make_inputs()]


@pytest.fixture
def model(library: Path) -> Model:
    return launcher.load(library, metas())


class TestRun:
    def test_inputs_become_outputs(self, model: Model) -> None:
        inputs = make_inputs()
        factor, bins, same, doubled, product, more = model.run(inputs)
        assert torch.equal(factor, 2 * torch.eye(3))  # a op without a C function of its own
        assert torch.equal(bins, torch.ones(4))
        assert same is inputs[0]  # returned as it is: the same Python object
        assert torch.equal(doubled, 2 * inputs[3]) and doubled.shape == (6, 5)
        assert torch.equal(product, torch.eye(400))
        assert torch.equal(more, torch.tensor([[2, 3, 4]])) and more.dtype == torch.int64

    def test_an_input_is_written_in_place(self, model: Model) -> None:
        inputs = make_inputs()
        address = inputs[2].data_ptr()
        for runs in (1, 2, 3):
            model.run(inputs)
            assert torch.equal(inputs[2], torch.full((2, 3), 6.0 * runs))
        assert inputs[2].data_ptr() == address

    def test_grad_mode_is_off_inside_and_unchanged_outside(self, model: Model) -> None:
        with torch.enable_grad():
            outputs = model.run(make_inputs())
            assert torch.is_grad_enabled()
        assert not any(t.requires_grad for t in outputs)

    def test_nothing_is_held_after_a_run(self, model: Model) -> None:
        inputs = make_inputs()
        before = [sys.getrefcount(t) for t in inputs], [t._use_count() for t in inputs]
        outputs = model.run(inputs)
        assert [t._use_count() for t in outputs if t is not inputs[0]] == [1] * 5
        del outputs
        assert ([sys.getrefcount(t) for t in inputs], [t._use_count() for t in inputs]) == before

    def test_other_threads_run_python_meanwhile(self, model: Model) -> None:
        """With a switch interval as long as this, a thread gets Python's lock only when it is let go."""
        running = done = overlapped = False

        def work() -> None:
            nonlocal running, done
            inputs = make_inputs()
            for _ in range(50):
                running = True
                model.run(inputs)
                running = False
            done = True

        thread = threading.Thread(target=work)
        interval = sys.getswitchinterval()
        sys.setswitchinterval(100.0)
        try:
            thread.start()
            while not done:
                overlapped |= running
                time.sleep(0)  # lets the lock go
        finally:
            sys.setswitchinterval(interval)
            thread.join()
        assert overlapped

    def test_two_threads_share_a_model(self, model: Model) -> None:
        wrong: list[object] = []

        def work(value: int) -> None:
            for _ in range(20):
                inputs = make_inputs()
                inputs[5] += value
                wrong.extend(
                    x for x in (model.run(inputs)[5] - inputs[5]).flatten().tolist() if x != 1
                )

        threads = [threading.Thread(target=work, args=(value,)) for value in (0, 10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


class TestRefused:
    @pytest.mark.parametrize(
        ("position", "other"),
        [
            (0, torch.zeros(5)),
            (0, torch.zeros(4, 1)),
            (0, torch.zeros(4, dtype=torch.float64)),
            (0, torch.zeros(8)[::2]),
            (3, torch.zeros(6, 5)),
            (5, torch.zeros(3, 1, dtype=torch.int64)),
        ],
    )
    def test_another_meta_before_anything_runs(
        self, model: Model, position: int, other: torch.Tensor
    ) -> None:
        inputs = make_inputs()
        inputs[position] = other
        with pytest.raises(
            Mismatch, match=rf"input {position} is \w+\[.*\] with strides"
        ) as caught:
            model.run(inputs)
        assert caught.value.position == position
        assert caught.value.got == TensorMeta.like(other)
        assert torch.equal(inputs[2], torch.zeros(2, 3))

    def test_what_does_not_matter_is_not_compared(self, model: Model) -> None:
        inputs = make_inputs()
        inputs[0] = torch.arange(-2.0, 4.0)[2:]  # a storage offset
        inputs[5] = inputs[5].as_strided((1, 3), (77, 1))  # the stride of a dim of size 1
        outputs = model.run(inputs)
        assert torch.equal(inputs[2], torch.full((2, 3), 6.0))
        assert outputs[5].tolist() == [[2, 3, 4]]

    @pytest.mark.parametrize(
        ("other", "text"),
        [
            (1.5, "got float"),
            (None, "got NoneType"),
            (torch.zeros(4, device="meta"), r"got Tensor with .*Meta"),
            (torch.zeros(4).to_sparse(), r"got Tensor with .*SparseCPU"),
            (torch.zeros(4, requires_grad=True), "got Tensor that requires grad"),
            (torch.nn.Parameter(torch.zeros(4)), "got Parameter that requires grad"),
            (torch._neg_view(torch.zeros(4)), r"got Tensor with .*Negative"),
        ],
    )
    def test_what_is_no_plain_tensor(self, model: Model, other: object, text: str) -> None:
        inputs: list[object] = [*make_inputs()]
        inputs[0] = other
        with pytest.raises(TypeError, match=f"input 0 must be a plain tensor .*{text}"):
            model.run(inputs)  # type: ignore[arg-type]

    def test_a_tensor_of_the_lazy_device(self, model: Model) -> None:
        inputs = make_inputs()
        inputs[0] = inputs[0].to(settings.device_name)
        with pytest.raises(TypeError, match=r"input 0 must be .* got LazyTensor with .*Python"):
            model.run(inputs)

    def test_another_number_of_tensors(self, model: Model) -> None:
        with pytest.raises(TypeError, match="expected a list of 6 tensors, got 5 in a list"):
            model.run(make_inputs()[:5])
        with pytest.raises(TypeError, match="expected a list of 6 tensors, got 6 in a tuple"):
            model.run(tuple(make_inputs()))  # type: ignore[arg-type]


class TestFailures:
    def test_an_op_that_raises(self, model: Model) -> None:
        """Its text, without the stack of C++; the model goes on working."""
        inputs = make_inputs()
        inputs[0][1] = float("inf")
        with pytest.raises(RuntimeError) as caught:
            model.run(inputs)
        if torch.__version__ >= "2.13":  # older ones tell stderr only
            assert "range of [0, inf] is not finite" in str(caught.value)
        assert "frame #" not in str(caught.value)
        assert torch.equal(model.run(make_inputs())[1], torch.ones(4))

    def test_an_op_of_the_proxy_executor_that_raises(self, model: Model) -> None:
        inputs = make_inputs()
        inputs[1].neg_()
        with pytest.raises(
            RuntimeError, match=r"not positive-definite|an op of the library failed"
        ):
            model.run(inputs)

    def test_the_proxy_executors_file_is_missing(self, library: Path, tmp_path: Path) -> None:
        alone = launcher.load(Path(shutil.copy(library, tmp_path)), metas())
        with pytest.raises(RuntimeError, match=r"json file|an op of the library failed"):
            alone.run(make_inputs())

    def test_a_file_that_is_no_library(self, tmp_path: Path) -> None:
        with pytest.raises(RuntimeError, match=r"missing\.so: cannot open shared object file"):
            launcher.load(tmp_path / "missing.so", [])
        path = tmp_path / "text.so"
        path.write_text("text")
        with pytest.raises(RuntimeError, match=r"text\.so: file too short|invalid ELF header"):
            launcher.load(path, [])

    def test_inputs_that_the_library_does_not_have(self, library: Path) -> None:
        with pytest.raises(RuntimeError, match="takes 6 inputs, not 5"):
            launcher.load(library, metas()[:5])

    def test_a_device_that_this_torch_cannot_run_on(self, library: Path) -> None:
        with pytest.raises(RuntimeError, match="this torch runs no compiled programs on mps"):
            launcher.load(library, metas(), "mps")

    def test_no_compiler_for_our_own_part(
        self, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CXX", "/nonexistent")
        monkeypatch.setattr(
            launcher, "extension", Extension("_ltc_launch", launcher.extension.source)
        )
        with (
            settings.override(cache_dir=str(tmp_path)),
            pytest.raises(RuntimeError, match=r"there is no C\+\+ compiler"),
        ):
            launcher.load(library, metas())


def test_a_model_that_goes_takes_its_library_along(library: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(library, tmp_path))
    shutil.copy(library.with_suffix(".json"), tmp_path)
    first, second = (launcher.load(path, metas()) for _ in range(2))
    assert str(path) in Path("/proc/self/maps").read_text()
    del first
    assert torch.equal(second.run(make_inputs())[1], torch.ones(4))
    del second
    assert torch.equal(launcher.load(path, metas()).run(make_inputs())[1], torch.ones(4))
