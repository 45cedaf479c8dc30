"""Train a CNN to read handwritten digits on the lazy device.

    python examples/mnist.py                             the digits shipped with the repository
    python examples/mnist.py --data-dir MNIST/raw        MNIST or Fashion-MNIST, as IDX files
    python examples/mnist.py --device cpu                the same run on eager PyTorch

What makes this a script for the lazy device: the device itself, and one mark_step() at the end
of each step. The loss is fetched every --log-interval steps only: a fetch waits for the device.
"""

import argparse
import contextlib
import gzip
import math
import struct
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import ltc_core as ltc
from ltc_core.errors import DataFormatError, LtcError

DIGITS_DIR = Path(__file__).parent / "data"
IMAGE_SIZE = 28
NUM_CLASSES = 10
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adadelta": torch.optim.Adadelta,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9),
}
DEFAULT_LR = {"adadelta": 1.0, "adam": 1e-3, "adamw": 1e-3, "sgd": 1e-2}


class Net(nn.Module):
    """Two convolutions, two linear layers: images [N, 1, 28, 28] to log-probabilities [N, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        x = self.fc2(self.dropout2(x))
        return F.log_softmax(x, dim=1)


# --- data: IDX files ---------------------------------------------------------------------------


def read_idx(path: Path, num_dims: int) -> torch.Tensor:
    """Read an IDX file of unsigned bytes, gzipped or not.

    Args:
        path: the file.
        num_dims: how many dimensions it must have: 3 for images, 1 for labels.
    Returns: a uint8 tensor.
    Raises: DataFormatError if the file is truncated, damaged or of another format.
    """

    def bad(what: str, got: str) -> DataFormatError:
        return DataFormatError(
            f"{path} {what}", got=got, next="Download the file again, or give another --data-dir."
        )

    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise bad("is a damaged gzip file.", str(error)) from error
    except OSError as error:
        raise bad("cannot be read.", str(error)) from error

    wanted = f"an IDX file of unsigned bytes with {num_dims} dimensions (00 00 08 {num_dims:02x})"
    if content[:4] != bytes((0, 0, 8, num_dims)):
        raise bad(f"is not {wanted}.", f"first bytes {content[:4].hex(' ') or '(none)'}")
    header_bytes = 4 + 4 * num_dims
    if len(content) < header_bytes:
        raise bad("is truncated.", f"{len(content)} bytes, against a header of {header_bytes}")
    dims = struct.unpack(f">{num_dims}I", content[4:header_bytes])
    num_bytes = math.prod(dims)
    if len(content) - header_bytes != num_bytes:
        state = "is truncated" if len(content) - header_bytes < num_bytes else "is too long"
        size = " x ".join(map(str, dims))
        raise bad(f"{state}.", f"{len(content) - header_bytes} bytes, against {size} in its header")
    if num_bytes == 0:
        raise bad("holds no samples.", f"dimensions {dims}")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=header_bytes).view(dims)


def find_idx(data_dir: Path, stem: str) -> Path:
    """Return the path of one of the four files, by any of the names it goes by."""
    names = [f"{stem}-ubyte", f"{stem}-ubyte.gz"]
    names += [name.replace("-idx", ".idx") for name in names]
    for name in names:
        if (data_dir / name).is_file():
            return data_dir / name
    found = sorted(path.name for path in data_dir.iterdir()) if data_dir.is_dir() else None
    raise DataFormatError(
        f"{data_dir} has no file {stem}-ubyte, nor {stem}-ubyte.gz.",
        got="no such folder" if found is None else f"{len(found)} entries: {', '.join(found[:5])}",
        next="--data-dir is the folder with the four IDX files of MNIST or Fashion-MNIST.",
    )


def load_split(data_dir: Path, prefix: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Read one half of a data set: images as uint8 [N, H, W] and labels as int64 [N]."""
    image_path = find_idx(data_dir, f"{prefix}-images-idx3")
    label_path = find_idx(data_dir, f"{prefix}-labels-idx1")
    images, labels = read_idx(image_path, 3), read_idx(label_path, 1).long()
    if len(images) != len(labels):
        raise DataFormatError(
            f"{image_path.name} and {label_path.name} do not belong together.",
            got=f"{len(images)} images, {len(labels)} labels in {data_dir}",
            next="Take both files from the same data set.",
        )
    if int(labels.max()) >= NUM_CLASSES:
        raise DataFormatError(
            f"{label_path} has labels that this model does not know.",
            got=f"label {int(labels.max())}, against 0 to {NUM_CLASSES - 1}",
            next="Use a data set of ten classes: MNIST, Fashion-MNIST, or the digits shipped here.",
        )
    return images, labels


def load_data(data_dir: Path, limit_train: int | None) -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test set: float32 [N, 1, 28, 28] of mean 0 and deviation 1."""
    train_images, train_labels = load_split(data_dir, "train")
    test_images, test_labels = load_split(data_dir, "t10k")
    train_images, train_labels = train_images[:limit_train], train_labels[:limit_train]

    def as_input(images: torch.Tensor) -> torch.Tensor:
        x = images.unsqueeze(1).float()
        if x.shape[2:] == (IMAGE_SIZE, IMAGE_SIZE):
            return x
        return F.interpolate(x, size=(IMAGE_SIZE, IMAGE_SIZE), mode="bilinear", align_corners=False)

    train, test = as_input(train_images), as_input(test_images)
    mean, deviation = train.mean(), train.std().clamp_min(1e-6)
    return (
        TensorDataset((train - mean) / deviation, train_labels),
        TensorDataset((test - mean) / deviation, test_labels),
    )


# --- progress ----------------------------------------------------------------------------------


@contextlib.contextmanager
def progress(total_steps: int) -> Iterator[Callable[[int, float, float], None]]:
    """Yield report(step, loss, samples_per_s): a bar on a terminal that has rich, else lines."""
    bar_class = None
    if sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            from rich.progress import Progress as bar_class
    if bar_class is None:
        width = len(str(total_steps))
        yield lambda step, loss, rate: print(
            f"step {step:{width}}/{total_steps}  loss {loss:.6f}  {rate:6.0f} samples/s", flush=True
        )
        return
    columns = (*bar_class.get_default_columns(), "{task.fields[figures]}")
    with bar_class(*columns) as bar:
        task = bar.add_task("training", total=total_steps, figures="")

        def report(step: int, loss: float, rate: float) -> None:
            bar.update(task, completed=step, figures=f"loss {loss:.4f}  {rate:.0f} samples/s")

        yield report


# --- training ----------------------------------------------------------------------------------


def train(model: nn.Module, data: TensorDataset, args: argparse.Namespace) -> None:
    """Train for args.epochs; the standard loop."""
    batch_size = min(args.batch_size, len(data))
    order = torch.Generator().manual_seed(args.seed)
    # drop_last: all steps have the same shapes, so all steps are the same graph.
    loader = DataLoader(data, batch_size, shuffle=True, drop_last=True, generator=order)
    optimizer = OPTIMIZERS[args.optimizer](model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    total_steps = args.epochs * len(loader)
    step = reported = 0
    since = time.perf_counter()
    model.train()
    with progress(total_steps) as report:
        for _ in range(args.epochs):
            for images, labels in loader:
                images, labels = images.to(args.device), labels.to(args.device)
                optimizer.zero_grad()
                loss = F.nll_loss(model(images), labels)
                loss.backward()
                optimizer.step()
                ltc.mark_step()
                step += 1
                if step % args.log_interval == 0 or step in (1, total_steps):
                    value, now = loss.item(), time.perf_counter()  # item() waits for the device
                    report(step, value, (step - reported) * batch_size / (now - since))
                    reported, since = step, now
            scheduler.step()


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset, device: torch.device) -> float:
    """Return how many percent of the test images the model reads correctly."""
    model.eval()
    correct = torch.zeros((), dtype=torch.int64, device=device)
    for images, labels in DataLoader(data, batch_size=1000):
        images, labels = images.to(device), labels.to(device)
        correct += (model(images).argmax(dim=1) == labels).sum()
        ltc.mark_step()
    return 100.0 * correct.item() / len(data)


def device_argument(text: str) -> torch.device:
    try:
        return torch.device(text)
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(str(error).splitlines()[0]) from error


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a CNN on the lazy device.")
    add = parser.add_argument
    add("--data-dir", type=Path, default=DIGITS_DIR, help="folder of IDX files (default: digits)")
    add("--epochs", type=positive, default=8)
    add("--batch-size", type=positive, default=64)
    add("--optimizer", choices=sorted(OPTIMIZERS), default="adadelta")
    add("--lr", type=float, help="learning rate (default: by optimizer; adadelta: 1.0)")
    add("--gamma", type=float, default=0.7, help="the learning rate's factor after each epoch")
    add("--seed", type=int, default=1)
    add("--device", type=device_argument, help="default: the lazy device; cpu to compare")
    add("--save", type=Path, default=Path("mnist_cnn.pt"), help="where the checkpoint goes")
    add("--log-interval", type=positive, default=10, help="steps between two losses")
    add("--limit-train", type=positive, help="train on this many images only")
    add("--accuracy-over", type=float, metavar="PERCENT", help="exit with 1 if not reached")
    args = parser.parse_args(argv)
    if not args.save.absolute().parent.is_dir():
        parser.error(f"argument --save: there is no folder {args.save.parent} to save in")
    args.device = args.device or ltc.lazy_device()
    args.lr = DEFAULT_LR[args.optimizer] if args.lr is None else args.lr
    return args


def run(args: argparse.Namespace) -> int:
    """Train, test, save, read back. Returns the exit status."""
    train_data, test_data = load_data(args.data_dir, args.limit_train)
    print(f"{len(train_data)} training and {len(test_data)} test images from {args.data_dir}")
    torch.manual_seed(args.seed)
    model = Net().to(args.device)
    torch.manual_seed(args.seed)  # once more: on cpu, making the model has used up random numbers
    print(f"training on device {args.device}, optimizer {args.optimizer}, lr {args.lr}")
    start = time.perf_counter()
    train(model, train_data, args)
    print(f"trained {args.epochs} epochs in {time.perf_counter() - start:.1f} s")

    percent = accuracy(model, test_data, args.device)
    print(f"test accuracy: {percent:.2f} %")

    ltc.save(model.state_dict(), args.save)
    fresh = Net().to(args.device)
    fresh.load_state_dict(torch.load(args.save, weights_only=True))
    reread = accuracy(fresh, test_data, args.device)
    print(f"checkpoint {args.save}: saved, read back, test accuracy {reread:.2f} %")

    print(ltc.metrics.summary())
    if reread != percent:
        print("FAIL: the checkpoint does not give the same accuracy")
        return 1
    if args.accuracy_over is not None:
        passed = percent > args.accuracy_over
        word = "PASS" if passed else "FAIL"
        print(f"{word}: test accuracy {percent:.2f} %, wanted over {args.accuracy_over:g} %")
        return 0 if passed else 1
    return 0


def main(argv: list[str] | None = None) -> int:
    try:
        return run(parse_args(argv))
    except LtcError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
