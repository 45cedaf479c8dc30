"""What `import ltc_core` does to the process, in order, each call with its reason.

No other module of the package registers anything when it is imported. `__init__` calls `set_up` once; `ltc_dist.setup`
does the same for `ltc_dist`.
"""

from __future__ import annotations

import atexit
import os
import time

from ltc_core import metrics, native_extension, profiler, uninterrupted
from ltc_core.api import c10d, closures, torch_compile, torch_export
from ltc_core.debug import explain, frequent
from ltc_core.device import module, register
from ltc_core.executors import artifacts, core_sharing, host_memory, openmp, program_costs, spinning
from ltc_core.executors.inductor import tier_report
from ltc_core.executors.inductor.compiler import service
from ltc_core.executors.reference import replay
from ltc_core.live import publisher
from ltc_core.ops import (
    as_strided,
    attention,
    autocast,
    backward,
    cpu_kernels,
    dispatch,
    encoder,
    factories,
    jit_trace,
    rnn,
    sgd_momentum,
    torch_load,
)
from ltc_core.record import fast_path
from ltc_core.report import recording
from ltc_core.runtime import (
    at_once,
    collective_tokens,
    device_hooks,
    devices,
    found_steps,
    idle_collectives,
    switch_interval,
)
from ltc_core.settings import warn_unknown
from ltc_core.tensor import lazy_tensor
from ltc_core.timeline import slices

__all__ = ["set_up"]


def set_up() -> None:
    """Register the device with PyTorch, and what runs at a fork and at the end of the process."""
    warn_unknown(os.environ)  # first: the calls below may fail because of a misspelt setting
    _open_streams()
    spinning.follow(time.perf_counter_ns())
    _register_device()
    metrics.register_sentences(tier_report.sentences)
    metrics.register_sentences(program_costs.sentences)
    metrics.register_sentences(spinning.sentences)
    metrics.register_sentences(at_once.sentences)
    devices.at_first_use(publisher.start_as_set)
    _register_fork_handlers()
    _register_exit_handlers()
    uninterrupted.keep_interrupts()


def _open_streams() -> None:
    """Have stdin, stdout and stderr go nowhere where they are closed: no other file of this process gets their number.

    A line that a library prints would go into it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            os.set_inheritable(descriptor, True)


def _register_device() -> None:
    # A thread compiles these C++ parts while the import goes on; `register` below waits for the device's own part.
    native_extension.build_ahead(host_memory.extension, fast_path.extension, replay.extension)
    lazy_tensor.use_handlers(dispatch.handler_of)
    register.register(device_hooks.install())
    # From here on PyTorch knows the device's name, which registering kernels needs.
    factories.register_factories()
    torch_load.register_loading()
    autocast.register_autocast()
    attention.register_attention()
    cpu_kernels.register_cpu_kernels()
    rnn.register_rnn()
    encoder.register_encoder()
    jit_trace.register_traced_convolution()
    # PyTorch decides by the type of a tensor which methods and which foreach implementations it uses.
    lazy_tensor.name_methods()
    lazy_tensor.join_foreach()
    # And it has no hook for functions of these names.
    as_strided.register_as_strided()
    torch_compile.register_torch_compile()
    torch_export.register_torch_export()
    backward.use_calling_thread()
    found_steps.register_optimizer_hook()
    sgd_momentum.register_first_momentum()
    c10d.register()
    # Last: once the C++ part is loaded, calls reach it before any of the above.
    fast_path.install()


def _register_fork_handlers() -> None:
    """Restore the device in a forked child, whose only thread is the one that forked.

    Handlers in the child run in the order of registration, handlers before a fork in the opposite order.
    """
    # Locks first: the later handlers take them.
    for renew in (
        uninterrupted.after_fork_in_child,
        slices.after_fork_in_child,
        recording.after_fork_in_child,
        publisher.after_fork_in_child,
        native_extension.after_fork_in_child,
        module.renew_lock,
        metrics.renew_lock,
        fast_path.after_fork_in_child,
        collective_tokens.renew_lock,
        idle_collectives.after_fork_in_child,
        artifacts.after_fork_in_child,  # file locks of the compile cache are the parent's
        service.after_fork_in_child,
        closures.after_fork_in_child,
        spinning.after_fork_in_child,
        core_sharing.after_fork_in_child,
        switch_interval.after_fork_in_child,
    ):
        os.register_at_fork(after_in_child=renew)
    # Runs after `devices.before_fork`: no graph runs any more, so the OpenMP team can be released.
    os.register_at_fork(before=openmp.release_team)
    os.register_at_fork(
        before=devices.before_fork,
        after_in_parent=devices.after_fork_in_parent,
        after_in_child=devices.after_fork_in_child,
    )


def _register_exit_handlers() -> None:
    """Finish the programs that were handed over, then report what was dropped. Handlers run in reverse order."""
    atexit.register(slices.at_exit)  # runs last: it has what the others finish
    atexit.register(recording.at_exit)
    atexit.register(publisher.at_exit)  # late: what the process finishes at exit can be watched
    atexit.register(closures.at_exit)
    atexit.register(frequent.at_exit)  # its counts include what the devices finish at exit
    atexit.register(service.at_exit)
    atexit.register(explain.at_exit)  # before the service drops what it still compiles
    atexit.register(devices.at_exit)
    atexit.register(profiler.at_exit)  # runs first: it drains the workers into a running trace
