"""The sanitizers find what they are for, and nothing in the smallest part; `make test-sanitize` runs all of them."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import sanitizers

ADDRESS = sanitizers.KINDS["address"]
pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None
    or not all(sanitizers.library(name).startswith("/") for name in ADDRESS.libraries),
    reason="the compiler has no sanitizers",
)

BAD = """
#include <Python.h>
static PyObject* read_beyond(PyObject*, PyObject*) {
  auto* values = new int[4]();
  volatile int at = 4;
  return PyLong_FromLong(values[at]);
}
static PyMethodDef methods[] = {{"read_beyond", read_beyond, METH_NOARGS, nullptr}, {}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_ltc_memory_bad", nullptr, -1, methods};
PyMODINIT_FUNC PyInit__ltc_memory_bad() { return PyModule_Create(&module); }
"""

# Importing all of `ltc_core` would build all parts.
BARE = "import sys; sys.path.insert(0, '.'); from tests.core import bare_package\n"

ALLOCATIONS = """
import threading, torch
from ltc_core.executors.host_memory import figures, release_kept, keep_memory

def work(seed):
    generator = torch.Generator().manual_seed(seed)
    held = []
    for _ in range(200):
        size = int(torch.randint(1 << 17, 1 << 20, (1,), generator=generator))
        held.append(torch.full((size,), seed, dtype=torch.uint8))
        if len(held) > 5:
            assert all(int(x) == seed for x in held.pop(seed % 3).aminmax())

assert keep_memory()
threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
release_kept()
assert figures().kept_bytes == 0
"""


def run(code: str, cache: Path, log: Path) -> subprocess.CompletedProcess[str]:
    log.mkdir()
    return subprocess.run(
        [sys.executable, "-c", BARE + code],
        cwd=sanitizers.ROOT,
        env=sanitizers.environment(ADDRESS, cache, log / "report"),
        capture_output=True,
        text=True,
    )


def test_a_fault_is_reported_and_the_allocator_has_none(tmp_path: Path) -> None:
    source = tmp_path / "ltc_memory_bad.cpp"
    source.write_text(BAD)
    load = f"""
from pathlib import Path
from ltc_core.native_extension import Extension
bad = Extension("_ltc_memory_bad", Path({str(source)!r}))
assert bad.load() is not None, bad.unavailable_reason
bad.loaded.read_beyond()
"""
    done = run(load, tmp_path, tmp_path / "bad")
    assert done.returncode != 0, done.stderr
    (report,) = sanitizers.reports(tmp_path / "bad")
    assert "heap-buffer-overflow" in report and "read_beyond" in report

    done = run(ALLOCATIONS, tmp_path, tmp_path / "good")
    assert done.returncode == 0, done.stderr
    assert sanitizers.reports(tmp_path / "good") == []
