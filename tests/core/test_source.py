"""The user's line: theirs, not ours and not PyTorch's, also in backward, in other threads and in generated code."""

import contextlib
import gc
import inspect
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import typing_extensions
from torch import nn

import ltc_core as ltc
from ltc_core import source
from ltc_core.settings import settings

ROOT = Path(__file__).parents[2]
HERE = "tests/core/test_source.py" if Path.cwd() == ROOT else __file__


@pytest.fixture
def device() -> torch.device:
    ltc.mark_step()
    return ltc.lazy_device()


def line_of(function: Callable[..., object], text: str) -> int:
    """The line number of the first line of a function that contains `text`."""
    lines, start = inspect.getsourcelines(function)
    return start + next(i for i, line in enumerate(lines) if text in line)


def lines_of(t: torch.Tensor) -> list[str]:
    """The lines of the pending nodes that a tensor comes from.

    A node keeps the line that recorded it first, so each test has a size of its own.
    """
    with settings.override(ir_debug=True):
        return [row.rpartition("# ")[2] for row in ltc.dump_ir([t]).splitlines() if "# " in row]


def test_the_innermost_line_of_the_user() -> None:
    def asked() -> str:
        return source.user_line()

    line = line_of(test_the_innermost_line_of_the_user, "return source")
    assert asked() == f"{HERE}:{line} in asked"


def test_a_deprecated_function_is_not_the_user() -> None:
    asked = typing_extensions.deprecated("", category=None)(source.user_line)
    told = asked()
    assert told.startswith(HERE) and told.endswith(" in test_a_deprecated_function_is_not_the_user")


def test_the_name_is_left_out_of_a_script() -> None:
    scope = {"source": source}
    exec(compile("line = source.user_line()", "my_script.py", "exec"), scope)
    assert scope["line"] == "my_script.py:1"


def test_through_pytorchs_modules(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(211, 3), nn.ReLU()).to(device)
    out = model(torch.ones(2, 211, device=device))
    rows = lines_of(out)
    assert len(rows) >= 3 and all(row.startswith(HERE) for row in rows)
    call = line_of(test_through_pytorchs_modules, "model(torch")
    assert rows[-1] == f"{HERE}:{call} in test_through_pytorchs_modules"


def test_in_the_users_own_module(device: torch.device) -> None:
    class Mine(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.exp()

    [*_, last] = lines_of(nn.Sequential(Mine())(torch.ones(212, device=device)))
    assert last == f"{HERE}:{line_of(Mine.forward, 'x.exp')} in forward"


def test_through_decorators_and_context_managers(device: torch.device) -> None:
    @contextlib.contextmanager
    def scope() -> Iterator[None]:
        yield

    @scope()
    @torch.no_grad()
    def decorated() -> torch.Tensor:
        with torch.autocast(device.type, enabled=False):
            return torch.ones(213, device=device).exp()

    [*_, last] = lines_of(decorated())
    assert last.endswith("in decorated")


def test_backward_is_where_it_was_called(device: torch.device) -> None:
    x = torch.ones(214, device=device, requires_grad=True)
    loss = (x.exp() * 2).sum()
    loss.backward()
    assert x.grad is not None
    line = line_of(test_backward_is_where_it_was_called, "loss.backward()")
    [*_, last] = lines_of(x.grad)
    assert last.startswith(f"{HERE}:{line} in test_backward_is_where_it_was_called")
    assert "backward" in last.rpartition(",")[2]


def test_a_function_of_the_user_in_backward_has_its_own_line(device: torch.device) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return grad.mul(2.0)

    x = torch.ones(215, device=device, requires_grad=True)
    Double.apply(x).sum().backward()
    assert x.grad is not None
    assert any(row.endswith("in backward") for row in lines_of(x.grad))


def test_in_another_thread(device: torch.device) -> None:
    made: list[torch.Tensor] = []

    def in_thread() -> None:
        made.append(torch.ones(216, device=device).exp())

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    [*_, last] = lines_of(made[0])
    assert last.endswith("in in_thread")


def test_the_outermost_line_is_the_users_script(tmp_path: Path) -> None:
    """And not the launcher's, nor the test runner's: what is installed is no script of the user."""
    (tmp_path / "library.py").write_text(
        "from ltc_core import source\ndef ask():\n    return source.outer_line(), source.user_line()\n"
    )
    script = "import library\ndef main():\n    return library.ask()\nprint(*main(), sep='\\n')\n"
    (tmp_path / "train.py").write_text(script)
    for command in (["train.py"], ["-m", "train"], ["-m", "runpy", "train"]):
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert done.stdout.splitlines() == ["train.py:4", "library.py:3 in ask"], done.stderr


def test_paths_are_short_under_the_working_directory_and_whole_elsewhere() -> None:
    code = compile(
        "def f():\n    return user_line()", os.path.join(os.getcwd(), "deep/x.py"), "exec"
    )
    scope: dict[str, Callable[[], str]] = {"user_line": source.user_line}
    exec(code, scope)
    assert scope["f"]() == "deep/x.py:2 in f"
    exec(compile("def g():\n    return user_line()", "/elsewhere/y.py", "exec"), scope)
    assert scope["g"]() == "/elsewhere/y.py:2 in g"


def test_it_keeps_no_frame_and_no_tensor_alive(device: torch.device) -> None:
    class Held:
        pass

    def function() -> weakref.ref[Held]:
        held = Held()
        kept.append(torch.ones(2, device=device).exp())
        assert source.user_line()
        return weakref.ref(held)

    kept: list[torch.Tensor] = []
    ref = function()
    gc.collect()
    assert ref() is None


def test_asked_only_on_new_branches(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs more than recording an op: a loop that repeats itself must not pay for it."""
    asked: list[int] = []
    user_line = source.user_line

    def counted() -> str:
        asked.append(1)
        return user_line()

    monkeypatch.setattr(source, "user_line", counted)
    x = torch.ones(17, device=device)
    counts = []
    for _ in range(4):
        x = (x * 0.5).tanh()
        ltc.mark_step()
        counts.append(len(asked))
    assert counts[0] > 0 and counts[-1] == counts[-2]
