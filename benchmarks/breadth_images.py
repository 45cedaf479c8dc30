"""Models on images, volumes and sound, and generative ones, for `benchmarks.breadth`.

The `forward` of each returns the loss of a batch. The code is ordinary PyTorch, and what is random in a
step is drawn in it. Next: breadth_sequences.py.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import NUM_CLASSES

# ---- images --------------------------------------------------------------------------------------


class Classifier(nn.Module):
    """Layers that end in logits, and the cross-entropy with the labels."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(x), labels)


def _group_conv(channels_in: int, channels_out: int) -> nn.Module:
    conv = nn.Conv2d(channels_in, channels_out, 3, padding=1)
    return nn.Sequential(conv, nn.GroupNorm(4, channels_out), nn.SiLU())


class UNet(nn.Module):
    """Segmentation: GroupNorm and SiLU, skips that are concatenated."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = (width, 2 * width, 4 * width)
        self.stem = _group_conv(3, width)
        self.down = nn.ModuleList(
            _group_conv(a, b) for a, b in zip(widths, widths[1:], strict=False)
        )
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(b, a, 2, 2) for a, b in zip(widths, widths[1:], strict=False)
        )
        self.merge = nn.ModuleList(_group_conv(2 * a, a) for a in widths[:-1])
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, images: Tensor, masks: Tensor) -> Tensor:
        x = self.stem(images)
        skips = []
        for down in self.down:
            skips.append(x)
            x = down(F.max_pool2d(x, 2))
        for up, merge in zip(reversed(self.up), reversed(self.merge), strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], 1))
        return F.cross_entropy(self.head(x), masks)


class ViT(nn.Module):
    """Patches, a class token, nn.TransformerEncoder with dropout."""

    def __init__(self, width: int, depth: int, num_patches: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, num_patches + 1, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, NUM_CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x_BTD = self.patches(images).flatten(2).transpose(1, 2)
        x_BTD = torch.cat([self.class_token.expand(len(images), -1, -1), x_BTD], 1)
        return F.cross_entropy(self.head(self.encoder(x_BTD + self.positions)[:, 0]), labels)


class _ConvNeXtBlock(nn.Module):
    """Depthwise convolution, then LayerNorm and linear layers on permuted channels, scaled."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        branch = self.depthwise(x).permute(0, 2, 3, 1)
        branch = self.scale * self.feed(self.norm(branch))
        out: Tensor = x + branch.permute(0, 3, 1, 2)
        return out


def convnext() -> nn.Module:
    """Return a small ConvNeXt of two stages."""
    return Classifier(
        nn.Conv2d(3, 32, 4, 4), _ConvNeXtBlock(32), _ConvNeXtBlock(32),
        nn.Conv2d(32, 64, 2, 2), _ConvNeXtBlock(64), _ConvNeXtBlock(64),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, NUM_CLASSES),
    )  # fmt: skip


def _separable(channels_in: int, channels_out: int, stride: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_in, 3, stride, 1, groups=channels_in, bias=False),
        nn.BatchNorm2d(channels_in), nn.ReLU6(),
        nn.Conv2d(channels_in, channels_out, 1, bias=False),
        nn.BatchNorm2d(channels_out), nn.ReLU6(),
    )  # fmt: skip


def mobile() -> nn.Module:
    """Return a net of depthwise separable convolutions, with dropout."""
    return Classifier(
        nn.Conv2d(3, 16, 3, 2, 1), _separable(16, 32, 1), _separable(32, 64, 2),
        _separable(64, 64, 1), _separable(64, 128, 2), _separable(128, 128, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(128, NUM_CLASSES),
    )  # fmt: skip


class _SwinBlock(nn.Module):
    """Attention within windows of 4 x 4, which every other block shifts by two."""

    WINDOW = 4

    def __init__(self, width: int, heads: int, shift: int) -> None:
        super().__init__()
        self.heads, self.shift = heads, shift
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(torch.zeros(heads, self.WINDOW**2, self.WINDOW**2))
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def _attend(self, x: Tensor) -> Tensor:
        windows, t, d = x.shape
        q, k, v = (
            self.qkv(x).view(windows, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(d // self.heads) + self.bias
        mixed: Tensor = self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(windows, t, d))
        return mixed

    def forward(self, x_BHWD: Tensor) -> Tensor:
        b, h, w, d = x_BHWD.shape
        size = self.WINDOW
        x = torch.roll(self.norm_1(x_BHWD), (-self.shift, -self.shift), (1, 2))
        x = x.view(b, h // size, size, w // size, size, d).transpose(2, 3)
        x = self._attend(x.reshape(-1, size * size, d))
        x = x.view(b, h // size, w // size, size, size, d).transpose(2, 3).reshape(b, h, w, d)
        x_BHWD = x_BHWD + torch.roll(x, (self.shift, self.shift), (1, 2))
        out: Tensor = x_BHWD + self.feed(self.norm_2(x_BHWD))
        return out


class Swin(nn.Module):
    """Shifted windows, then patches merged two by two."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.stage_1 = nn.Sequential(_SwinBlock(width, 4, 0), _SwinBlock(width, 4, 2))
        self.merge = nn.Linear(4 * width, 2 * width)
        self.stage_2 = nn.Sequential(_SwinBlock(2 * width, 4, 0), _SwinBlock(2 * width, 4, 2))
        self.head = nn.Linear(2 * width, NUM_CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.stage_1(self.patches(images).permute(0, 2, 3, 1).contiguous())
        corners = [x[:, row::2, column::2] for row in (0, 1) for column in (0, 1)]
        x = self.stage_2(self.merge(torch.cat(corners, -1)))
        return F.cross_entropy(self.head(x.mean((1, 2))), labels)


def net_3d() -> nn.Module:
    """Return a net of convolutions over volumes."""
    return Classifier(
        nn.Conv3d(1, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU(), nn.MaxPool3d(2),
        nn.Conv3d(8, 16, 3, padding=1), nn.BatchNorm3d(16), nn.ReLU(), nn.MaxPool3d(2),
        nn.Conv3d(16, 32, 3, padding=1), nn.BatchNorm3d(32), nn.ReLU(),
        nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(32, NUM_CLASSES),
    )  # fmt: skip


def audio_net() -> nn.Module:
    """Return a net of convolutions over time: strided ones, then dilated ones."""
    layers: list[nn.Module] = [nn.Conv1d(1, 32, 16, 8), nn.ReLU(), nn.Conv1d(32, 64, 8, 4)]
    for dilation in (1, 2, 4, 8):
        conv = nn.Conv1d(64, 64, 3, padding=dilation, dilation=dilation)
        layers += [nn.BatchNorm1d(64), nn.LeakyReLU(0.1), conv]
    return Classifier(*layers, nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(64, NUM_CLASSES))


# ---- generative models ---------------------------------------------------------------------------


class GAN(nn.Module):
    """DCGAN: transposed convolutions with BatchNorm against convolutions with LeakyReLU."""

    NOISE = 32

    def __init__(self, width: int) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(self.NOISE, 4 * width, 4), nn.BatchNorm2d(4 * width), nn.ReLU(),
            nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1), nn.BatchNorm2d(2 * width), nn.ReLU(),
            nn.ConvTranspose2d(2 * width, 1, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip
        self.discriminator = nn.Sequential(
            nn.Conv2d(1, 2 * width, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.Conv2d(2 * width, 4 * width, 4, 2, 1), nn.BatchNorm2d(4 * width), nn.LeakyReLU(0.2),
            nn.Conv2d(4 * width, 1, 4), nn.Flatten(0),
        )  # fmt: skip

    def discriminator_loss(self, images: Tensor, noise: Tensor) -> Tensor:
        real = self.discriminator(images)
        fake = self.discriminator(self.generator(noise).detach())
        loss = F.binary_cross_entropy_with_logits(real, torch.ones_like(real))
        return loss + F.binary_cross_entropy_with_logits(fake, torch.zeros_like(fake))

    def generator_loss(self, images: Tensor, noise: Tensor) -> Tensor:
        fake = self.discriminator(self.generator(noise))
        return F.binary_cross_entropy_with_logits(fake, torch.ones_like(fake))


class VAE(nn.Module):
    """A variational autoencoder: the latent is drawn in the step."""

    def __init__(self, size: int, width: int, latent: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(size, width), nn.ReLU(), nn.Linear(width, width))
        self.mean, self.log_variance = nn.Linear(width, latent), nn.Linear(width, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, width), nn.ReLU(), nn.Linear(width, size))

    def forward(self, pixels: Tensor) -> Tensor:
        hidden = F.relu(self.encoder(pixels))
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        latent = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        loss = F.binary_cross_entropy_with_logits(self.decoder(latent), pixels, reduction="sum")
        divergence: Tensor = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum()
        return (loss + divergence) / len(pixels)


class _TimedBlock(nn.Module):
    """A residual block that a time embedding shifts."""

    def __init__(self, channels_in: int, channels_out: int, time_width: int) -> None:
        super().__init__()
        self.conv_1 = _group_conv(channels_in, channels_out)
        self.conv_2 = _group_conv(channels_out, channels_out)
        self.time = nn.Linear(time_width, channels_out)
        self.shortcut = nn.Conv2d(channels_in, channels_out, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        hidden = self.conv_1(x) + self.time(time)[:, :, None, None]
        out: Tensor = self.conv_2(hidden) + self.shortcut(x)
        return out


class Diffusion(nn.Module):
    """Denoising: time and noise are drawn in the step; a small U-Net with attention predicts the noise."""

    STEPS, TIME = 100, 32

    def __init__(self, width: int) -> None:
        super().__init__()
        alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, self.STEPS), 0)
        self.register_buffer("alphas", alphas)
        self.embed = nn.Sequential(nn.Linear(self.TIME, self.TIME), nn.SiLU())
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = _TimedBlock(width, 2 * width, self.TIME)
        self.norm = nn.GroupNorm(4, 2 * width)
        self.attention = nn.MultiheadAttention(2 * width, 4, batch_first=True)
        self.up = _TimedBlock(3 * width, width, self.TIME)
        self.head = nn.Conv2d(width, 3, 3, padding=1)

    def _time(self, time: Tensor) -> Tensor:
        half = self.TIME // 2
        frequencies = torch.exp(-math.log(1e4) * torch.arange(half, device=time.device) / half)
        angles = time[:, None].float() * frequencies
        embedded: Tensor = self.embed(torch.cat([angles.sin(), angles.cos()], 1))
        return embedded

    def _predict(self, x: Tensor, time: Tensor) -> Tensor:
        embedded = self._time(time)
        skip = self.stem(x)
        x = self.down(F.avg_pool2d(skip, 2), embedded)
        tokens = self.norm(x).flatten(2).transpose(1, 2)
        mixed, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        x = x + mixed.transpose(1, 2).reshape(x.shape)
        x = F.interpolate(x, scale_factor=2.0, mode="nearest")
        out: Tensor = self.head(self.up(torch.cat([x, skip], 1), embedded))
        return out

    def forward(self, images: Tensor) -> Tensor:
        time = torch.randint(self.STEPS, (len(images),), device=images.device)
        noise = torch.randn_like(images)
        assert isinstance(self.alphas, Tensor)
        alpha = self.alphas[time][:, None, None, None]
        noisy = alpha.sqrt() * images + (1 - alpha).sqrt() * noise
        return F.mse_loss(self._predict(noisy, time), noise)
