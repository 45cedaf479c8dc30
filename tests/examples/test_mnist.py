"""examples/mnist.py: its IDX reader on bad files, and a short run on the lazy device and on cpu."""

import contextlib
import gzip
import importlib.util
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ltc_core.errors import DataFormatError
from tests import prepared

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "mnist.py"
FILES = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
SHORT = ("--epochs", "2", "--limit-train", "160", "--batch-size", "32", "--log-interval", "1")


@pytest.fixture(scope="module")
def mnist() -> ModuleType:
    spec = importlib.util.spec_from_file_location("examples_mnist", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def idx(*dims: int, content: bytes | None = None, magic: bytes = b"\0\0\x08") -> bytes:
    size = 1
    for dim in dims:
        size *= dim
    body = bytes(i % 10 for i in range(size)) if content is None else content
    return magic + bytes([len(dims)]) + struct.pack(f">{len(dims)}I", *dims) + body


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A folder of four good files: 20 training and 10 test images of 28x28."""
    for stem in FILES:
        count = 20 if stem.startswith("train") else 10
        dims = (count, 28, 28) if "images" in stem else (count,)
        (tmp_path / f"{stem}-ubyte").write_bytes(idx(*dims))
    return tmp_path


# --- the reader --------------------------------------------------------------------------------


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_reads_what_was_written(
    mnist: ModuleType, tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    (tmp_path / "f").write_bytes(pack(idx(2, 3, 5)))
    read = mnist.read_idx(tmp_path / "f", 3)
    assert read.dtype == torch.uint8
    assert torch.equal(read, (torch.arange(30) % 10).to(torch.uint8).view(2, 3, 5))


@pytest.mark.parametrize(
    "content, text",
    [
        (idx(4, 2, 2)[:-1], r"is truncated.*\n  got: 15 bytes, against 4 x 2 x 2 in its header"),
        (idx(4, 2, 2)[:9], r"is truncated.*\n  got: 9 bytes, against a header of 16"),
        (idx(4, 2, 2) + b"x", r"is too long.*\n  got: 17 bytes, against 4 x 2 x 2"),
        (idx(16), r"is not an IDX file .* with 3 dimensions .*\n  got: first bytes 00 00 08 01"),
        (idx(4, 2, 2, magic=b"\0\0\x0d"), r"is not an IDX file .*\n  got: first bytes 00 00 0d 03"),
        (b"\x89PNG\r\n\x1a\n", r"is not an IDX file .*\n  got: first bytes 89 50 4e 47"),
        (b"", r"is not an IDX file .*\n  got: first bytes \(none\)"),
        (idx(0, 28, 28), r"holds no samples.*\n  got: dimensions \(0, 28, 28\)"),
        (idx(2**32 - 1, 2**32 - 1, 2**32 - 1, content=b"12"), r"is truncated.*\n  got: 2 bytes"),
        (gzip.compress(idx(4, 2, 2))[:-9], r"is a damaged gzip file.*\n  got: Compressed file end"),
        (b"\x1f\x8b" + b"no gzip" * 9, r"is a damaged gzip file.*\n  got: .*compression method"),
    ],
    ids="truncated header long dims dtype foreign empty none huge gz-truncated gz-foreign".split(),
)
def test_bad_file(mnist: ModuleType, tmp_path: Path, content: bytes, text: str) -> None:
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(content)
    with pytest.raises(DataFormatError, match=text) as caught:
        mnist.read_idx(path, 3)
    assert str(path) in str(caught.value)
    assert "Next: Download the file again" in str(caught.value)


@given(content=st.binary(max_size=60))
@settings(deadline=None)
def test_any_bytes_are_read_or_refused(
    mnist: ModuleType, tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any-bytes"
    for data in (content, idx(1)[:4] + content, b"\x1f\x8b\x08" + content):
        path.write_bytes(data)
        with contextlib.suppress(DataFormatError):
            assert mnist.read_idx(path, 1).dim() == 1


def test_missing_folder_and_file(mnist: ModuleType, data_dir: Path) -> None:
    with pytest.raises(DataFormatError, match=r"has no file train-images.*\n  got: no such folder"):
        mnist.load_data(data_dir / "nowhere", None)
    (data_dir / "t10k-labels-idx1-ubyte").unlink()
    text = r"has no file t10k-labels-idx1-ubyte.*\n  got: 3 entries: t10k-images.*\n  Next: --data"
    with pytest.raises(DataFormatError, match=text):
        mnist.load_data(data_dir, None)


def test_images_and_labels_must_match(mnist: ModuleType, data_dir: Path) -> None:
    (data_dir / "train-labels-idx1-ubyte").write_bytes(idx(19))
    with pytest.raises(DataFormatError, match=r"do not belong together.*\n  got: 20 images, 19 la"):
        mnist.load_data(data_dir, None)


def test_labels_of_another_data_set(mnist: ModuleType, data_dir: Path) -> None:
    (data_dir / "train-labels-idx1-ubyte").write_bytes(idx(20, content=bytes(range(20))))
    with pytest.raises(
        DataFormatError, match=r"labels that this model.*\n  got: label 19, against"
    ):
        mnist.load_data(data_dir, None)


def test_other_spellings_of_the_names(mnist: ModuleType, data_dir: Path) -> None:
    for stem in FILES:
        path = data_dir / f"{stem}-ubyte"
        spelt = data_dir / f"{stem.replace('-idx', '.idx')}-ubyte.gz"
        spelt.write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    train, test = mnist.load_data(data_dir, 7)
    assert [tuple(x.shape) for x in train.tensors] == [(7, 1, 28, 28), (7,)]
    assert [tuple(x.shape) for x in test.tensors] == [(10, 1, 28, 28), (10,)]


def test_the_shipped_digits(mnist: ModuleType) -> None:
    counts = torch.zeros(10, dtype=torch.int64)
    for prefix, count in (("train", 1497), ("t10k", 300)):
        images, labels = mnist.load_split(mnist.DIGITS_DIR, prefix)
        assert tuple(images.shape) == (count, 8, 8)
        assert int(images.max()) == 16
        counts += labels.bincount(minlength=10)
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    train, _ = mnist.load_data(mnist.DIGITS_DIR, None)
    assert abs(float(train.tensors[0].mean())) < 1e-4
    assert abs(float(train.tensors[0].std()) - 1) < 1e-4


# --- the script --------------------------------------------------------------------------------


def run_script(tmp_path: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return prepared.run(
        [sys.executable, "-W", "error", str(SCRIPT), *args],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def losses(output: str) -> list[float]:
    return [float(text) for text in re.findall(r"^step +\d+/\d+  loss (\S+)", output, re.MULTILINE)]


def test_lazy_run_equals_cpu_run(tmp_path: Path) -> None:
    lazy = run_script(tmp_path, *SHORT)
    cpu = run_script(tmp_path, *SHORT, "--device", "cpu")
    assert lazy.returncode == 0, lazy.stderr
    assert cpu.returncode == 0, cpu.stderr
    assert "training on device cpu" in cpu.stdout
    assert "training on device cpu" not in lazy.stdout
    assert len(losses(lazy.stdout)) == 10
    torch.testing.assert_close(losses(lazy.stdout), losses(cpu.stdout), rtol=1e-4, atol=1e-5)


def test_checkpoint_is_written_and_reported(tmp_path: Path) -> None:
    done = run_script(tmp_path, *SHORT, "--save", "here.ckpt", "--optimizer", "sgd")
    assert done.returncode == 0, done.stderr
    accuracies = re.findall(r"test accuracy:? (\d+\.\d+) %", done.stdout)
    assert len(accuracies) == 2 and accuracies[0] == accuracies[1]
    state = torch.load(tmp_path / "here.ckpt", weights_only=True)
    assert state["fc1.weight"].shape == (128, 9216)
    assert {value.device.type for value in state.values()} == {"cpu"}


def test_accuracy_not_reached_is_a_failure(tmp_path: Path) -> None:
    short = ("--epochs", "1", "--limit-train", "2")
    done = run_script(tmp_path, *short, "--accuracy-over", "99.9", "--device", "cpu")
    assert done.returncode == 1, done.stderr
    assert re.search(r"FAIL: test accuracy .* %, wanted over 99.9 %", done.stdout)


def test_reads_a_folder_of_idx_files(tmp_path: Path, data_dir: Path) -> None:
    done = run_script(tmp_path, "--data-dir", str(data_dir), "--epochs", "1", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert "20 training and 10 test images" in done.stdout


def test_bad_data_is_one_message_and_no_traceback(tmp_path: Path, data_dir: Path) -> None:
    (data_dir / "t10k-images-idx3-ubyte").write_bytes(b"<html>not found</html>")
    done = run_script(tmp_path, "--data-dir", str(data_dir))
    assert done.returncode == 2
    assert done.stderr.startswith("DataFormatError: ")
    assert "Next: Download the file again" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "args, text",
    [
        (["--epochs", "0"], "argument --epochs: invalid positive value: '0'"),
        (["--device", "toaster"], "argument --device: Expected one of"),
        (["--save", "/no/such/folder/x.pt"], "there is no folder /no/such/folder to save in"),
        (["--optimizer", "adagard"], "argument --optimizer: invalid choice: 'adagard'"),
    ],
)
def test_bad_arguments(
    mnist: ModuleType, capsys: pytest.CaptureFixture[str], args: list[str], text: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        mnist.main(args)
    assert caught.value.code == 2
    assert text in capsys.readouterr().err
