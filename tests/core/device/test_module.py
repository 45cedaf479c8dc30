"""The device as PyTorch sees it, with fake hooks.

Registration is for the life of a process, so each test is a child process. The children see
`ltc_core` as a bare package: importing the real one would register the real runtime.
"""

import os
import sys
import textwrap
from pathlib import Path

import pytest

from tests import prepared

ROOT = Path(__file__).parents[3]

BARE_PACKAGE = f"""
import sys, warnings
warnings.simplefilter("error")
sys.path.insert(0, {str(ROOT)!r})
from tests.core import bare_package
"""

FAKE_HOOKS = """
import threading
import torch
from ltc_core.errors import DeviceError
from ltc_core.settings import settings
from ltc_core.device import build, register as registration

class Hooks:
    def __init__(self):
        self.calls = []
        self.seeds = {}
    def synchronize(self, device):
        self.calls.append(("synchronize", device))
    def memory_stats(self, device):
        return 100 + device, 200, 300, 400
    def reset_peak_memory_stats(self, device):
        self.calls.append(("reset_peak", device))
    def memory_info(self, device):
        return 5, 6 + device
    def empty_cache(self):
        self.calls.append("empty_cache")
    def generator_new(self, gen_id, device):
        self.seeds[gen_id] = 1000 + device
        self.calls.append(("new", gen_id, device))
    def generator_free(self, gen_id):
        del self.seeds[gen_id]
        self.calls.append(("free", gen_id))
    def generator_manual_seed(self, gen_id, seed):
        self.seeds[gen_id] = seed
    def generator_initial_seed(self, gen_id):
        return self.seeds[gen_id]
    def generator_seed(self, gen_id):
        self.seeds[gen_id] = 77
        return 77
    def generator_get_state(self, gen_id):
        return torch.tensor(list(self.seeds[gen_id].to_bytes(8, "little")), dtype=torch.uint8)
    def generator_set_state(self, gen_id, state):
        self.seeds[gen_id] = int.from_bytes(bytes(state.tolist()), "little")
    def generator_clone(self, src_id, dst_id):
        self.seeds[dst_id] = self.seeds[src_id]
    def rng_manual_seed(self, device, seed):
        self.seeds[device] = seed
    def rng_initial_seed(self, device):
        return self.seeds[device]
    def rng_get_state(self, device):
        return self.generator_get_state(device)
    def rng_set_state(self, state, device):
        self.generator_set_state(device, state)

hooks = Hooks()

def raised(kind, function, *args):
    try:
        function(*args)
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__} from {function}")
"""

REGISTERED = "registration.register(hooks)\nassert registration.is_native()\nhooks.calls.clear()\n"


def run(code: str, prelude: str = BARE_PACKAGE + FAKE_HOOKS + REGISTERED, **env: str) -> str:
    """Run `code` after `prelude` in a child; return what it printed, and fail if it failed."""
    child = prepared.run(
        [sys.executable, "-c", prelude + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=55,
        cwd=ROOT,
        env={"LTC_NUM_DEVICES": "3", **os.environ, "PYTHONPATH": str(ROOT), **env},
    )
    assert child.returncode == 0, f"rc {child.returncode}\n{child.stdout}\n{child.stderr}"
    assert "Traceback" not in child.stderr, child.stderr
    return child.stdout


def test_there_are_n_devices_and_each_thread_has_its_own_current_one() -> None:
    run("""
        assert torch.ltc.device_count() == registration.device_count() == 3
        assert torch.ltc.current_device() == 0
        registration.set_device(2)
        seen = []
        thread = threading.Thread(target=lambda: seen.append(torch.ltc.current_device()))
        thread.start()
        thread.join()
        assert seen == [0] and registration.current_device() == 2
        torch.ltc.set_device("ltc:1")
        assert torch.accelerator.current_device_index() == 1
        torch.ltc.set_device(-1)
        with torch.ltc.device(0):
            assert torch.ltc.current_device() == 0
            with torch.ltc.device(None), torch.ltc.device_of(torch.ones(1)):
                assert torch.ltc.current_device() == 0
        assert torch.ltc.current_device() == 1

        text = raised(DeviceError, torch.ltc.set_device, 3)
        assert "there is no device ltc:3" in text and "legal is 0 to 2" in text, text
        assert "LTC_NUM_DEVICES" in text, text
        assert "Expected a ltc device" in raised(ValueError, torch.ltc.set_device, "cpu")
        assert "out of range" in raised(IndexError, torch.accelerator.set_device_index, 3)
        get = torch.ltc._utils._get_device_index
        assert get("ltc:2") == 2 and get("ltc") == get(None) == 1
        assert get("cpu", allow_cpu=True) == -1
        assert "but got None" in raised(ValueError, get, None, False)

        registration.set_num_devices(2)
        assert torch.ltc.device_count() == 3
        registration.set_num_devices(5)
        assert torch.ltc.device_count() == 5 == len(torch.ltc.default_generators)
        assert hooks.calls == [("new", 3, 3), ("new", 4, 4)]
        assert "cannot be 65" in raised(DeviceError, registration.set_num_devices, 65)
    """)


def test_the_name_is_a_setting() -> None:
    run(
        """
        assert torch.Generator("other:1").device == torch.device("other", 1)
        assert torch.other.get_device_name(1) == "other:1"
        assert torch.accelerator.current_accelerator().type == "other"
        assert not torch.ones(1).is_other and callable(torch.nn.Linear(1, 1).other)
        import torch.other.random, torch.other.amp
        """,
        LTC_DEVICE_NAME="other",
    )


def test_generators_belong_to_the_hooks() -> None:
    run("""
        import copy, pickle
        generator = torch.Generator("ltc:1")
        assert generator.device == torch.device("ltc:1") and generator.initial_seed() == 1001
        number = registration.generator_id(generator)
        assert hooks.calls == [("new", number, 1)] and number >= 3
        assert generator.manual_seed(5) is generator and hooks.seeds[number] == 5
        state = generator.get_state()
        assert state.tolist() == [5, 0, 0, 0, 0, 0, 0, 0] and state.dtype == torch.uint8
        generator.manual_seed(2**64 - 1)
        assert generator.initial_seed() == 2**64 - 1
        assert generator.seed() == 77
        generator.set_state(state)
        assert generator.initial_seed() == 5

        other = generator.clone_state()
        assert other.device == generator.device and other.initial_seed() == 5
        other.manual_seed(6)
        assert generator.initial_seed() == 5
        assert registration.generator_id(other) not in (number, 0, 1, 2)
        assert pickle.loads(pickle.dumps(generator)).initial_seed() == 5
        assert copy.deepcopy(generator).initial_seed() == 5
        gone = registration.generator_id(other)
        del other
        assert ("free", gone) in hooks.calls and gone not in hooks.seeds

        assert [registration.generator_id(g) for g in torch.ltc.default_generators] == [0, 1, 2]
        assert "expected a torch.Generator" in raised(
            TypeError, registration.generator_id, torch.Generator())
        assert "expected a torch.Generator" in raised(TypeError, registration.generator_id, 3)
        assert "ByteTensor" in raised(TypeError, generator.set_state, torch.ones(3))
        assert "no separate offset" in raised(NotImplementedError, generator.set_offset, 4)
    """)


def test_threads_that_share_a_generator_do_not_wait_for_each_other_for_ever() -> None:
    """The hooks give the GIL away while PyTorch would hold the generator's mutex."""
    run("""
        import time
        class Slow(Hooks):
            def generator_get_state(self, gen_id):
                time.sleep(1e-4)
                return super().generator_get_state(gen_id)
            def generator_manual_seed(self, gen_id, seed):
                time.sleep(1e-4)
                super().generator_manual_seed(gen_id, seed)
        hooks.__class__ = Slow
        generator = torch.Generator("ltc:2")
        done = []
        def work():
            for seed in range(200):
                generator.manual_seed(seed)
                generator.set_state(generator.get_state())
                generator.clone_state()
            done.append(1)
        threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(40)
        assert len(done) == 4, "deadlock"
        assert len(hooks.seeds) == 4
    """)


def test_torch_accelerator_has_every_function() -> None:
    run("""
        acc = torch.accelerator
        assert acc.is_available() and acc.device_count() == 3
        assert acc.current_accelerator() == torch.device("ltc")
        acc.set_device_index(2)
        assert acc.current_device_index() == torch.ltc.current_device() == 2
        with acc.device_index(1):
            assert acc.current_device_index() == 1
        assert acc.current_device_index() == 2
        assert acc.memory_allocated(1) == 101 and acc.memory_allocated() == 102
        assert acc.max_memory_allocated() == 200
        assert acc.memory_reserved() == 300 and acc.max_memory_reserved() == 400
        assert acc.memory_stats("ltc:0")["allocated_bytes.all.current"] == 100
        if hasattr(acc, "get_memory_info"):
            assert acc.get_memory_info(1) == (5, 7)
        acc.reset_accumulated_memory_stats()
        acc.reset_peak_memory_stats(1)
        acc.empty_cache()
        if hasattr(acc, "empty_host_cache"):
            acc.empty_host_cache()
        acc.synchronize()
        acc.synchronize("ltc:1")
        stream = acc.current_stream(1)
        assert stream.device == torch.device("ltc:1")
        acc.set_stream(stream)
        assert acc.current_device_index() == 1
        stream.synchronize()
        torch.Stream("ltc:2").synchronize()
        with torch.Stream("ltc:2"):
            pass
        if hasattr(acc, "get_device_capability"):
            dtypes = acc.get_device_capability()["supported_dtypes"]
            assert torch.bfloat16 in dtypes
            assert dtypes <= torch.ltc.get_device_capability()["supported_dtypes"]
        assert hooks.calls == [
            ("reset_peak", 1), "empty_cache", ("synchronize", 2), ("synchronize", 1),
            ("synchronize", 1), ("synchronize", 2),
        ], hooks.calls
        assert "out of range" in raised(IndexError, acc.memory_stats, 3)
    """)


def test_an_error_of_a_hook_comes_out_as_itself() -> None:
    run("""
        error = KeyError("the very same")
        def fail(*args):
            raise error
        generator = torch.Generator("ltc")
        kept = generator.get_state()
        for name in [name for name in dir(Hooks) if not name.startswith("_")]:
            if name != "generator_free":
                setattr(hooks, name, fail)
        acc = torch.accelerator
        for function in (
            acc.synchronize, acc.empty_cache, acc.memory_stats, acc.reset_peak_memory_stats,
            acc.current_stream().synchronize, lambda: torch.Generator("ltc"), generator.seed,
            lambda: generator.manual_seed(1), generator.initial_seed, generator.get_state,
            lambda: generator.set_state(kept), generator.clone_state,
            torch.ltc.synchronize, torch.ltc.memory_stats, lambda: torch.manual_seed(1),
        ):
            try:
                function()
            except KeyError as got:
                assert got is error, function
            else:
                raise AssertionError(function)
        hooks.memory_stats = lambda device: (1, 2)
        assert "2 figures, expected 4" in raised(TypeError, acc.memory_stats)
        hooks.generator_initial_seed = lambda gen_id: "text"
        raised(TypeError, generator.initial_seed)
        del hooks.generator_seed
        generator.set_state.__self__
    """)


def test_pinned_memory_for_a_data_loader() -> None:
    run("""
        from torch.utils.data import DataLoader
        # DataLoader of torch 2.9 says this to itself.
        warnings.filterwarnings("ignore", "The argument 'device' of Tensor", DeprecationWarning)
        data = [(torch.full((4,), i), i) for i in range(10)]
        for workers in (0, 2):
            loader = DataLoader(data, batch_size=5, pin_memory=True, num_workers=workers)
            batches = list(loader)
            assert [int(x.sum()) for x, _ in batches] == [40, 140]
            assert all(x.is_pinned() and y.is_pinned() for x, y in batches)
        x = torch.arange(3)
        assert not x.is_pinned()
        pinned = x.pin_memory()
        assert pinned.is_pinned() and pinned[2:].is_pinned() and pinned.pin_memory() is pinned
        assert pinned.tolist() == [0, 1, 2] and not x.is_pinned()
        assert torch.empty(0).pin_memory().numel() == 0
        assert torch.empty(5, pin_memory=True).is_pinned()
    """)


def test_the_device_module() -> None:
    run("""
        import torch.ltc.random, torch.ltc.amp
        ltc = torch.ltc
        assert ltc.is_available() and not ltc._is_in_bad_fork()
        assert not ltc.is_initialized()  # there are several: a DeviceMesh sets that of LOCAL_RANK
        ltc.set_device(0)
        assert ltc.is_initialized()
        ltc.init(), ltc._lazy_init()
        assert ltc.get_device_name() == "ltc:0"
        assert ltc.get_device_properties(1) == ltc.DeviceProperties("ltc:1", 7)
        assert ltc.mem_get_info(1) == (5, 7)
        assert (ltc.memory_allocated(1), ltc.max_memory_allocated()) == (101, 200)
        assert (ltc.memory_reserved(), ltc.max_memory_reserved()) == (300, 400)
        assert ltc.memory_stats()["reserved_bytes.all.peak"] == 400
        assert "total_bytes" in ltc.memory_summary()
        assert "ltc:2" in ltc.memory_summary(2, abbreviated=True)
        ltc.reset_peak_memory_stats(2), ltc.empty_cache(), ltc.synchronize(2), ltc.synchronize()
        assert hooks.calls == [
            ("reset_peak", 2), "empty_cache", ("synchronize", 2), ("synchronize", 0)
        ]

        torch.manual_seed(3)
        assert hooks.seeds == {0: 3, 1: 3, 2: 3}
        with ltc.device(1):
            ltc.manual_seed(4)
            assert ltc.initial_seed() == 4
            chosen = ltc.seed()
            assert hooks.seeds == {0: 3, 1: chosen, 2: 3}
        everywhere = ltc.seed_all()
        assert set(hooks.seeds.values()) == {everywhere}
        ltc.manual_seed_all(9)
        states = ltc.get_rng_state_all()
        with torch.random.fork_rng(devices=[0, 1, 2], device_type="ltc"):
            torch.manual_seed(1)
        assert set(hooks.seeds.values()) == {9}
        ltc.manual_seed(2)
        assert ltc.get_rng_state("ltc:0")[0] == 2
        ltc.set_rng_state_all(states)
        ltc.set_rng_state(torch.tensor([8] + 7 * [0], dtype=torch.uint8), torch.device("ltc:2"))
        assert hooks.seeds == {0: 9, 1: 9, 2: 8}

        assert torch.get_autocast_dtype("ltc") == torch.bfloat16
        with torch.autocast("ltc"), ltc.amp.autocast(dtype=torch.float16):
            assert torch.is_autocast_enabled("ltc")
            assert torch.get_autocast_dtype("ltc") == torch.float16
        assert not ltc.amp.GradScaler(enabled=False).is_enabled()
        assert torch.bfloat16 in ltc.get_amp_supported_dtype()
        assert not torch.ones(1).is_ltc and callable(torch.nn.Linear(1, 1).ltc)
    """)


def test_streams_and_events_cut_the_graph() -> None:
    run("""
        ltc = torch.ltc
        stream = ltc.current_stream("ltc:1")
        assert stream.device == torch.device("ltc:1") and isinstance(stream, torch.Stream)
        assert stream == ltc.default_stream(1) == ltc.Stream(1, priority=-1)
        assert stream != ltc.current_stream(2)
        with ltc.stream(stream):
            assert ltc.current_device() == 1
        with stream, ltc.Stream(2), stream as entered:
            assert ltc.current_device() == 1 and entered is stream
        with ltc.stream(None):
            assert ltc.current_device() == 0
        ltc.set_stream(stream)
        assert ltc.current_device() == 1 and ltc.current_stream() == stream
        start, end = ltc.Event(enable_timing=True), ltc.Event(enable_timing=True)
        start.record()
        end = stream.record_event(end)
        assert start.query() and end.query() and stream.query()
        assert start.elapsed_time(end) >= 0
        assert "must be recorded" in raised(RuntimeError, start.elapsed_time, ltc.Event())
        native = [torch.Event("ltc:1", enable_timing=True) for _ in range(2)]
        for event in native:
            event.record()
        assert native[0].elapsed_time(native[1]) >= 0 and native[0].query()
        stream.wait_event(end)
        start.wait()
        start.wait(stream)
        assert hooks.calls == []
        stream.synchronize()
        stream.wait_stream(ltc.current_stream(2))
        end.synchronize()
        plain = torch.Event("ltc:2")
        plain.record(torch.Stream("ltc:2"))
        plain.synchronize()
        assert hooks.calls == 2 * [("synchronize", 1), ("synchronize", 2)]
        assert stream.record_event().query()
    """)


def test_adamw_trains_a_wrapper_tensor_on_device_one() -> None:
    """Autograd's threads go through the guard; this thread's current device stays what it was."""
    run("""
        class Wrapped(torch.Tensor):
            @staticmethod
            def __new__(cls, inner):
                return torch.Tensor._make_wrapper_subclass(
                    cls, inner.shape, dtype=inner.dtype, device="ltc:1",
                    requires_grad=inner.requires_grad)
            def __init__(self, inner):
                self.held = inner.detach()
            @classmethod
            def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
                is_main = threading.current_thread() is threading.main_thread()
                devices.add((is_main, torch.ltc.current_device()))
                def unwrap(x):
                    if isinstance(x, torch.device) and x.type == "ltc":
                        return torch.device("cpu")
                    return x.held if isinstance(x, Wrapped) else x
                args, kwargs = torch.utils._pytree.tree_map(unwrap, (args, kwargs or {}))
                out = func(*args, **kwargs)
                wrap = lambda x: Wrapped(x) if isinstance(x, torch.Tensor) else x
                return torch.utils._pytree.tree_map(wrap, out)

        devices = set()
        torch.manual_seed(0)
        eager = torch.nn.Linear(4, 3)
        wrapped = torch.nn.Linear(4, 3)
        wrapped.weight = torch.nn.Parameter(Wrapped(eager.weight.detach().clone()))
        wrapped.bias = torch.nn.Parameter(Wrapped(eager.bias.detach().clone()))
        assert wrapped.weight.device == torch.device("ltc:1") and wrapped.weight.is_ltc
        x = torch.randn(8, 4)
        losses = []
        for model, batch in ((eager, x), (wrapped, Wrapped(x))):
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            for _ in range(3):
                loss = model(batch).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(getattr(loss, "held", loss).detach().item())
        assert losses[:3] == losses[3:] and losses[0] > losses[2], losses
        assert (False, 1) in devices, devices
        assert torch.ltc.current_device() == 0
    """)


def test_a_second_backend_is_refused() -> None:
    run(
        """
        torch.utils.rename_privateuse1_backend("someone")
        text = raised(DeviceError, registration.register, hooks)
        assert "'someone' is there already" in text, text
        assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in text, text
        assert not hasattr(torch, "ltc") and not registration.is_registered()
        """,
        prelude=BARE_PACKAGE + FAKE_HOOKS,
    )


def test_registering_twice_changes_nothing() -> None:
    run("""
        module = torch.ltc
        registration.register(Hooks())
        assert torch.ltc is module and registration.is_registered()
        assert "already called" in raised(RuntimeError, registration._native.init, 1, hooks)
        assert "only grow" in raised(IndexError, registration._native.set_num_devices, 1)
    """)


def test_too_many_devices_are_refused_before_anything_is_registered() -> None:
    run(
        """
        text = raised(DeviceError, registration.register, hooks)
        assert "cannot be 65" in text and "LTC_NUM_DEVICES" in text, text
        assert torch._C._get_privateuse1_backend_name() == "privateuseone"
        settings.num_devices = 2
        registration.register(hooks)
        assert torch.ltc.device_count() == 2
        """,
        prelude=BARE_PACKAGE + FAKE_HOOKS,
        LTC_NUM_DEVICES="65",
    )


def test_without_a_compiler_there_is_one_device_and_one_sentence(tmp_path: Path) -> None:
    run(
        """
        if not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"):
            assert "no other way" in raised(DeviceError, registration.register, hooks)
            sys.exit()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            registration.register(hooks)
        assert len(caught) == 1, [str(w.message) for w in caught]
        text = str(caught[0].message)
        assert "there is no C++ compiler" in text and "one device" in text, text
        assert "\\n" not in text, text
        assert not registration.is_native() and registration.device_count() == 1
        registration.set_device(0)
        assert registration.current_device() == 0
        assert "there is no device ltc:1" in raised(DeviceError, registration.set_device, 1)
        assert "can have no more" in raised(DeviceError, registration.set_num_devices, 2)
        assert "no torch.Generator" in raised(DeviceError, registration.generator_id, None)
        torch.manual_seed(3)
        assert hooks.seeds == {0: 3} and torch.ltc.default_generators == ()
        torch.ltc.current_stream().synchronize()
        torch.ltc.current_stream().wait_stream(torch.ltc.current_stream())
        event = torch.ltc.Event()
        event.record()
        event.synchronize()
        assert hooks.calls == 2 * [("synchronize", 0)]
        stream = torch.ltc.current_stream()
        with torch.autocast("ltc"), torch.ltc.device(0), torch.ltc.stream(stream), stream:
            assert torch.get_autocast_dtype("ltc") == torch.bfloat16
        assert torch.ltc.memory_allocated() == 100
        """,
        prelude=BARE_PACKAGE + FAKE_HOOKS,
        CXX="/nonexistent/g++",
        LTC_CACHE_DIR=str(tmp_path),
    )


def test_without_a_compiler_an_older_torch_cannot_go_on(tmp_path: Path) -> None:
    run(
        """
        module = torch.utils.backend_registration
        module.__dict__.pop("_setup_privateuseone_for_python_backend", None)
        text = raised(DeviceError, registration.register, hooks)
        assert "has no other way" in text and "/nonexistent/g++" in text and "Next:" in text, text
        assert torch._C._get_privateuse1_backend_name() == "privateuseone"
        """,
        prelude=BARE_PACKAGE + FAKE_HOOKS,
        CXX="/nonexistent/g++",
        LTC_CACHE_DIR=str(tmp_path),
    )


def test_exit_with_generators_alive() -> None:
    """Generators that die while the interpreter does must not call into it."""
    run("""
        import time
        torch.kept = torch.Generator("ltc:1")
        ring = [torch.Generator("ltc:2")]
        ring.append(ring)
        held = []
        def hold():
            held.append(torch.Generator("ltc"))
            time.sleep(60)
        threading.Thread(target=hold, daemon=True).start()
        while not held:
            time.sleep(0.01)
    """)


def test_a_forked_child_keeps_the_device() -> None:
    run("""
        import os
        child = os.fork()
        if child == 0:
            ok = not torch.ltc._is_in_bad_fork()
            torch.manual_seed(4)
            os._exit(0 if ok and 4 in hooks.seeds.values() else 1)
        assert os.waitpid(child, 0)[1] == 0
    """)


FAKE_PACKAGE = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, sys.argv[0]]
import ltc_autoload
"""


@pytest.mark.parametrize(
    ("value", "printed"),
    [("", "quiet"), ("0", "quiet"), ("1", "registered"), ("yes", "registered")],
)
def test_autoload_acts_only_when_asked_to(tmp_path: Path, value: str, printed: str) -> None:
    (tmp_path / "ltc_dist.py").write_text(
        "print('registered')\nimport ltc_autoload\nltc_autoload.load()\n"
    )
    code = f"""
        sys.path.insert(0, {str(tmp_path)!r})
        ltc_autoload.load()
        ltc_autoload.load()
        assert "torch" not in sys.modules
        if "ltc_dist" not in sys.modules:
            print("quiet")
    """
    assert run(code, prelude=FAKE_PACKAGE, LTC_AUTOLOAD=value).split() == [printed]


def test_autoload_never_raises(tmp_path: Path) -> None:
    (tmp_path / "ltc_dist.py").write_text("raise OSError('broken install')\n")
    code = f"""
        import warnings
        sys.path.insert(0, {str(tmp_path)!r})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ltc_autoload.load()
        print(*[w.message for w in caught])
    """
    printed = run(code, prelude=FAKE_PACKAGE, LTC_AUTOLOAD="1")
    assert (
        printed
        == "LTC_AUTOLOAD is set, but ltc_dist cannot be imported: OSError('broken install')\n"
    )
