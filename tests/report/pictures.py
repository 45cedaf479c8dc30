"""`make pictures`: runs four scripts with a report each, and writes pictures of the reports into docs/pictures.

docs/report.md shows them. They are made again when the page changes, so that they stay true.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.launching import launcher
from tests.report.browser import Page

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"

CNN = """
import time
import torch
from torch import nn
import ltc_core as ltc
import ltc_dist as ltd

class Digits(torch.utils.data.Dataset):
    def __len__(self):
        return 64 * 40 + 20  # the last batch is smaller

    def __getitem__(self, k):
        time.sleep(0.0002)  # decoding
        return torch.randn(1, 28, 28), k % 10

device = ltd.lazy_device()
torch.manual_seed(0)
net = nn.Sequential(
    nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(),
    nn.Linear(32 * 11 * 11, 128), nn.ReLU(), nn.Linear(128, 10),
).to(device)
optimizer = torch.optim.AdamW(net.parameters())
losses = []
for x, y in ltd.MpDeviceLoader(torch.utils.data.DataLoader(Digits(), 64), device):
    optimizer.zero_grad()
    out = net(x)
    loss = nn.functional.cross_entropy(out, y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    wrong = torch.nonzero(out.argmax(1) != y)
"""

GPT = """
import torch
from torch import nn
import ltc_core as ltc
import ltc_dist as ltd

WIDTH = 64

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, WIDTH))

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))

class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(96, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(6)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 96)

    def forward(self, tokens):
        return self.head(self.norm(self.blocks(self.embedding(tokens))))

device = ltd.lazy_device()
torch.manual_seed(0)
model = GPT().to(device)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(30):
    length = 64 if step != 20 else 48
    text = torch.randint(96, (8, length + 1)).to(device)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    ltc.mark_step()
"""

JOB = """
import time
import torch
import ltc_dist as ltd

device = ltd.lazy_device()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(64 * 40, 256))
for (x,) in ltd.MpDeviceLoader(torch.utils.data.DataLoader(data, 64), device):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    if ltd.get_ordinal() == 1:
        time.sleep(0.03)
    ltd.optimizer_step(optimizer)
"""


COMPILED = """
import torch
from torch import nn
import ltc_core as ltc

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

device = ltc.lazy_device()
torch.manual_seed(0)
net = nn.Sequential(Block(), Block()).to(device)
for step in range(10):
    net.zero_grad()
    net(torch.randn(32, 64).to(device)).square().mean().backward()
    ltc.mark_step()
"""


def run(script: str, name: str, directory: Path, command: Sequence[str], **settings: str) -> Path:
    """Run a script with a report; returns the page."""
    (directory / name).write_text(script)
    where = directory / f"run-{name}"
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "LTC_REPORT": str(where),
        "LTC_FALLBACK": "allow",
        **settings,
    }
    subprocess.run([*command, name], cwd=directory, env=environ, check=True, timeout=300)
    return where / "report.html"


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        cnn = run(CNN, "cnn.py", place, [sys.executable])
        gpt = run(GPT, "gpt.py", place, [sys.executable])
        compiled = run(COMPILED, "mlp.py", place, [sys.executable], LTC_COMPILE="sync")
        job = run(JOB, "job.py", place, launcher("--nprocs", "2"))
        with Page(cnn, width=1100) as page:
            for section in ("summary", "steps", "waits", "data"):
                page.picture(PICTURES / f"{section}.png", f"#{section}")
        with Page(gpt, width=1100) as page:
            for section in ("time", "programs", "memory"):
                page.picture(PICTURES / f"{section}.png", f"#{section}", 760)
            for key in ("/GPT", "/GPT/blocks", "/GPT/blocks/2"):
                page.click(f'.viewer [data-key="{key}"]')
            page.ask("graphs.viewers[0].fit()")
            page.picture(PICTURES / "graph.png", "#graph")
            page.click('[data-compare="3"]')
            page.picture(PICTURES / "difference.png", "#graph")
        with Page(compiled, width=1100) as page:
            for module in ("/Sequential", "/Sequential (backward)"):
                for key in (module, f"{module}/0"):
                    page.click(f'.viewer [data-key="{key}"]')
            page.ask("document.querySelector('#color').value = 'kernel'")
            page.ask("document.querySelector('#color').dispatchEvent(new Event('change'))")
            page.click(".viewer [data-kernel]")
            page.ask("graphs.viewers[0].fit()")
            page.picture(PICTURES / "kernels.png", "#graph")
        with Page(job, width=1100) as page:
            page.picture(PICTURES / "ranks.png", "#job")
    for path in sorted(PICTURES.iterdir()):
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
