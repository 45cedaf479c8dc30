"""The leak checks of conftest.py report each kind of leak, and nothing about a clean test."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEAKING = """
import functools, os, socket, subprocess, sys, tempfile, threading, time

kept = []

def test_thread():
    stop = threading.Event()
    threading.Thread(target=stop.wait, name="leaking", daemon=True).start()

def test_child():
    kept.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))

def test_after_child():
    kept[0].kill()
    kept[0].wait()

def test_variable():
    os.environ["LEAKED_VARIABLE"] = "1"

def test_variable_is_put_back():
    assert "LEAKED_VARIABLE" not in os.environ

def test_file():
    tempfile.mkstemp(prefix="leaked-file")

def test_file_is_removed():
    assert os.listdir(tempfile.gettempdir()) == []

def test_port():
    kept.append(socket.create_server(("127.0.0.1", 0)))

def values():
    import torch, ltc_core
    return torch.ones(10_000, device=ltc_core.lazy_device())

@functools.cache
def cached_values():
    return values()

def test_values():
    kept.append(values())

def test_values_of_a_cache():
    cached_values()

def test_values_in_a_cycle():
    cycle = [values()]
    cycle.append(cycle)

def test_error_nobody_saw():
    import torch, ltc_core
    index = torch.tensor([7]).to(ltc_core.lazy_device())
    kept.append(torch.ones(3, device=index.device)[index])

def test_error_is_gone():
    import ltc_core
    ltc_core.mark_step(wait=True)

def test_worker_of_the_runtime():
    threading.Thread(target=threading.Event().wait, name="ltc-worker", daemon=True).start()

def test_slow_end():
    threading.Thread(target=time.sleep, args=(0.2,)).start()

def test_clean(tmp_path, monkeypatch):
    monkeypatch.setenv("CLEAN", "1")
    (tmp_path / "file").write_text("")
    with tempfile.NamedTemporaryFile(), socket.create_server(("127.0.0.1", 0)):
        subprocess.run([sys.executable, "-c", ""], check=True)
"""
EXPECTED = {
    "test_thread": r"thread 'leaking' is still there",
    "test_child": r"child process \d+ is still there: .*time\.sleep\(600\)",
    "test_variable": r"environment variable LEAKED_VARIABLE was None and is '1'",
    "test_file": r"file 'leaked-file\w+' was left in TMPDIR",
    "test_error_nobody_saw": r"nobody saw this error of the background: .*index",
    "test_values": r"40000 bytes of values are still on device 0",
    "test_port": r"port \d+ is still listened on",
}


def test_each_leak_is_reported(tmp_path: Path) -> None:
    conftest = (Path(__file__).parent / "conftest.py").read_text()
    (tmp_path / "conftest.py").write_text(conftest.replace("GRACE_S = 2.0", "GRACE_S = 0.5"))
    (tmp_path / "test_leaking.py").write_text(LEAKING)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--basetemp", "tmp", "."],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    failed = set(re.findall(r"^ERROR .*::(test_\w+)", done.stdout, re.MULTILINE))
    assert failed == set(EXPECTED), done.stdout
    for name, text in EXPECTED.items():
        section = done.stdout.split(f"ERROR at teardown of {name} ")[1].split("\n____")[0]
        assert re.search(text, section), section
    assert re.search(r"16 passed, 7 errors", done.stdout)
