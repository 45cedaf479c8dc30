"""Make the device known to PyTorch, once per process.

In: the hooks of the runtime (`module.DeviceHooks`). Out: the name, `torch.<name>`, `t.<name>()`,
autocast's dtype, and the C++ side (`build`) with `settings.num_devices` devices. Without the C++
side, PyTorch's own registration for Python backends is used: one device, no generators, no pinned
memory, and a warning that says so. Called by `setup`.
"""

import threading
import warnings
from types import ModuleType

import torch
from torch.utils import backend_registration

from ltc_core.device import build, module
from ltc_core.device.module import DeviceHooks
from ltc_core.errors import DeviceError, SettingsError
from ltc_core.settings import settings

_UNNAMED = "privateuseone"

_lock = threading.Lock()
_registered = False
_native: ModuleType | None = None


def register(hooks: DeviceHooks) -> None:
    """Register the device; later calls change nothing.

    Raises:
        DeviceError: another backend is registered in PyTorch's only slot for external devices, or the C++ side cannot
            be built and this torch has no registration from Python.
    Cost:
        The first import of a machine compiles a C++ file (a few seconds); later ones load it.
    """
    global _registered, _native
    with _lock:
        if _registered:
            return
        _refuse_foreign_backend()
        native = build.extension.load()
        if native is None:
            _register_from_python(hooks)
        else:
            _register_native(native, hooks)
        torch.set_autocast_dtype(settings.device_name, torch.bfloat16)
        _native, _registered = native, True


def is_registered() -> bool:
    """Whether the device is registered in this process."""
    return _registered


def is_native() -> bool:
    """Whether the C++ side is loaded; several devices, generators and pinned memory need it."""
    return _native is not None


def device_count() -> int:
    """Return the number of devices of this process."""
    return module.device_count()


def current_device() -> int:
    """Return the calling thread's device index."""
    return module.current_device()


def set_device(index: int) -> None:
    """Make `index` the calling thread's device."""
    module.set_device(index)


def set_num_devices(count: int) -> None:
    """Increase the number of devices; a smaller or equal count changes nothing.

    Raises:
        DeviceError: the C++ side is not there, or `count` is above its limit.
    """
    with _lock:
        if count <= device_count():
            return
        if _native is None:
            raise DeviceError(
                f"this process has one {settings.device_name} device and can have no more",
                got=f"{count} devices asked for; {build.extension.unavailable_reason}",
                next=f"{build.extension.remedy}, then start again.",
            )
        try:
            _native.set_num_devices(count)
        except IndexError as error:
            raise DeviceError(
                f"the number of {settings.device_name} devices cannot be {count}",
                got=str(error),
                next="ask for fewer devices.",
            ) from None
        getattr(torch, settings.device_name).default_generators = _default_generators(_native)


def _settle_num_devices() -> None:
    """Set the number of devices from the environment at their first use: scripts may set it after their imports."""
    assert _native is not None
    count, there = settings.num_devices, _native.device_count()
    if count < there:
        raise SettingsError(
            f"the number of {settings.device_name} devices was set too late to have an effect",
            got=f"{count}, and this process has {there} since the first import",
            where="the environment",
            next="set LTC_NUM_DEVICES before the first import; later it can only be made larger",
        )
    set_num_devices(count)


def generator_id(generator: torch.Generator) -> int:
    """Return the id under which the hooks know a generator of the device.

    Raises:
        TypeError: it is a generator of another device.
        DeviceError: the C++ side is not there, so there are no generators.
    """
    if _native is None:
        raise DeviceError(
            f"there is no torch.Generator for {settings.device_name}",
            got=build.extension.unavailable_reason,
            next=f"{build.extension.remedy}, then start again.",
        )
    number: int = _native.generator_id(generator)
    return number


def set_python_dispatch(t: torch.Tensor, is_on: bool) -> None:
    """Set whether calls with `t` reach the `__torch_dispatch__` of its class. Needs the C++ side."""
    assert _native is not None
    _native.set_python_dispatch(t._cdata, is_on)


def hold_gloo_threads(seconds: float) -> None:
    """Let a thread of gloo that got a message of another size stop so long before it aborts this process.

    Meanwhile who waits for the message can find out what the sender is at. Without the C++ side it aborts at once.
    """
    if _native is not None:
        _native.hold_gloo_threads(seconds)


class _StateAsBytes:
    """The hooks as C++ calls them: a generator's state is passed as bytes.

    The headers that read a tensor in C++ would triple the build time.
    """

    def __init__(self, hooks: DeviceHooks) -> None:
        self._hooks = hooks

    def __getattr__(self, name: str) -> object:
        return getattr(self._hooks, name)

    def generator_get_state(self, gen_id: int) -> bytes:
        return bytes(self._hooks.generator_get_state(gen_id).tolist())

    def generator_set_state(self, gen_id: int, state: bytes) -> None:
        self._hooks.generator_set_state(gen_id, torch.tensor(list(state), dtype=torch.uint8))


class _OneDevice:
    """The `DeviceIndices` without the C++ side: device 0 is the only device."""

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def exchange_device(self, index: int) -> int:
        return 0


def _refuse_foreign_backend() -> None:
    holder = torch._C._get_privateuse1_backend_name()
    if holder != _UNNAMED:
        raise DeviceError(
            f"the device {settings.device_name} cannot be registered with PyTorch",
            got=f"the backend {holder!r} is there already, and there is room for one",
            next=f"keep {holder!r} out of this process; if it loads itself with torch, set "
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0.",
        )


def _register_native(native: ModuleType, hooks: DeviceHooks) -> None:
    name = settings.device_name
    try:
        native.init(settings.peek("num_devices"), _StateAsBytes(hooks))
    except IndexError as error:
        raise DeviceError(
            f"the number of {name} devices cannot be {settings.num_devices}",
            got=str(error),
            next="set LTC_NUM_DEVICES to fewer.",
        ) from None
    backend_registration.rename_privateuse1_backend(name)
    made = module.make_module(hooks, native, _default_generators(native))
    module.before_first_count(_settle_num_devices)
    torch._register_device_module(name, made)  # type: ignore[no-untyped-call]
    if not hasattr(
        torch.Tensor, f"is_{name}"
    ):  # PyTorch has these methods for some names, such as xla
        backend_registration.generate_methods_for_privateuse1_backend(for_storage=False)


def _register_from_python(hooks: DeviceHooks) -> None:
    name = settings.device_name
    setup = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
    if setup is None:
        raise DeviceError(
            f"the device {name} cannot be built; torch {torch.__version__} has no other way to it",
            got=build.extension.unavailable_reason,
            next=f"{build.extension.remedy}, or use torch 2.13.",
        )
    setup(rename=name, backend_module=module.make_module(hooks, _OneDevice(), ()))
    warnings.warn(
        f"{build.extension.unavailable_reason}, so {name} has one device, no torch.Generator and no "
        f"pinned memory, and most of torch.accelerator fails. Next: {build.extension.remedy}, then "
        "start again.",
        stacklevel=3,
    )


def _default_generators(native: ModuleType) -> tuple[torch.Generator, ...]:
    return tuple(native.default_generator(index) for index in range(native.device_count()))
