"""Models on sequences, for `benchmarks.breadth`: recurrent ones, a scan, transformers.

The `forward` of each returns the loss of a batch: tokens, and what should follow or a label. Next:
breadth_models.py.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.models import NUM_CLASSES


def _token_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


class LSTM(nn.Module):
    """A language model of two LSTM layers."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        hidden_BTD, _ = self.lstm(self.tokens(tokens_BT))
        return _token_loss(self.head(hidden_BTD), targets_BT)


class GRUSeq2Seq(nn.Module):
    """Translation: a GRU reads, a cell writes token by token and attends to what was read."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.encoder = nn.GRU(width, width, batch_first=True)
        self.decoder = nn.GRUCell(2 * width, width)
        self.head = nn.Linear(2 * width, vocabulary)

    def forward(self, source_BT: Tensor, given_BT: Tensor, targets_BT: Tensor) -> Tensor:
        memory_BTD, last = self.encoder(self.tokens(source_BT))
        state_BD, context_BD = last[0], memory_BTD.mean(1)
        logits = []
        for token_BD in self.tokens(given_BT).unbind(1):
            state_BD = self.decoder(torch.cat([token_BD, context_BD], 1), state_BD)
            weights = torch.softmax(torch.bmm(memory_BTD, state_BD.unsqueeze(2)), 1)
            context_BD = (weights * memory_BTD).sum(1)
            logits.append(self.head(torch.cat([state_BD, context_BD], 1)))
        return _token_loss(torch.stack(logits, 1), targets_BT)


class SelectiveScan(nn.Module):
    """Mamba-like layers: the state is updated in a loop over time by gates made from the input."""

    def __init__(self, vocabulary: int, width: int, state: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.project = nn.Linear(width, 2 * width)
        self.conv = nn.Conv1d(width, width, 4, padding=3, groups=width)
        self.select, self.delta = nn.Linear(width, 2 * state), nn.Linear(width, width)
        self.log_decay = nn.Parameter(torch.log(torch.arange(1.0, state + 1)).repeat(width, 1))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        x, gate = self.project(self.tokens(tokens_BT)).chunk(2, -1)
        x = F.silu(self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        delta = F.softplus(self.delta(x))
        into, out_of = self.select(x).chunk(2, -1)
        decay = -torch.exp(self.log_decay)
        state_BDN = x.new_zeros(len(x), *decay.shape)
        outputs = []
        for t in range(x.shape[1]):
            step = delta[:, t, :, None]
            state_BDN = torch.exp(step * decay) * state_BDN
            state_BDN = state_BDN + step * into[:, t, None] * x[:, t, :, None]
            outputs.append((state_BDN * out_of[:, t, None]).sum(-1))
        mixed_BTD = torch.stack(outputs, 1) * F.silu(gate)
        return _token_loss(self.head(mixed_BTD), targets_BT)


class _RMSNorm(nn.Module):
    """Each row over the root of its mean square, scaled."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class _T5Attention(nn.Module):
    """Attention whose scores get a bias; keys and values come from `memory`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = _RMSNorm(width)
        self.q, self.kv = (
            nn.Linear(width, width, bias=False),
            nn.Linear(width, 2 * width, bias=False),
        )
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, memory: Tensor | None, bias: Tensor | None) -> Tensor:
        normed = self.norm(x)
        q = self.q(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv(normed if memory is None else memory).chunk(2, -1)
        k = k.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        v = v.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        scores = q @ k.transpose(-2, -1)
        if bias is not None:
            scores = scores + bias
        mixed = scores.softmax(-1) @ v
        out: Tensor = x + self.out(mixed.transpose(1, 2).flatten(2))
        return out


class T5(nn.Module):
    """Encoder and decoder with a bias for each bucket of relative positions, shared by the layers."""

    BUCKETS = 16

    def __init__(self, vocabulary: int, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.encoder_bias = nn.Embedding(self.BUCKETS, heads)
        self.decoder_bias = nn.Embedding(self.BUCKETS, heads)

        def attentions() -> nn.ModuleList:
            return nn.ModuleList(_T5Attention(width, heads) for _ in range(depth))

        def feeds() -> nn.ModuleList:
            return nn.ModuleList(
                nn.Sequential(
                    _RMSNorm(width),
                    nn.Linear(width, 4 * width, bias=False),
                    nn.ReLU(),
                    nn.Linear(4 * width, width, bias=False),
                )  # fmt: skip
                for _ in range(depth)
            )

        self.encoder, self.encoder_feeds = attentions(), feeds()
        self.decoder, self.cross, self.decoder_feeds = attentions(), attentions(), feeds()
        self.encoder_norm, self.decoder_norm = _RMSNorm(width), _RMSNorm(width)

    def _bias(self, table: nn.Module, length: int, device: torch.device, causal: bool) -> Tensor:
        places = torch.arange(length, device=device)
        distance = places[None, :] - places[:, None]
        half = self.BUCKETS // 2
        far = (distance.abs().float() + 1).log2() * 2
        buckets = far.long().clamp(max=half - 1) + half * (distance > 0).long()
        bias_HQK: Tensor = table(buckets).permute(2, 0, 1)
        return bias_HQK.masked_fill(distance > 0, -1e9) if causal else bias_HQK

    def forward(self, source_BT: Tensor, given_BT: Tensor, targets_BT: Tensor) -> Tensor:
        memory, x = self.tokens(source_BT), self.tokens(given_BT)
        bias = self._bias(self.encoder_bias, memory.shape[1], memory.device, causal=False)
        for attend, feed in zip(self.encoder, self.encoder_feeds, strict=True):
            memory = attend(memory, None, bias)
            memory = memory + feed(memory)
        memory = self.encoder_norm(memory)
        bias = self._bias(self.decoder_bias, x.shape[1], x.device, causal=True)
        for attend, cross, feed in zip(self.decoder, self.cross, self.decoder_feeds, strict=True):
            x = cross(attend(x, None, bias), memory, None)
            x = x + feed(x)
        scale = x.shape[-1] ** -0.5
        return _token_loss(self.decoder_norm(x) * scale @ self.tokens.weight.t(), targets_BT)


class _LlamaBlock(nn.Module):
    """RMSNorm, rotary embedding, more query heads than heads of keys, SwiGLU."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.norm_1, self.norm_2 = _RMSNorm(width), _RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * kv_heads * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x_BTD.shape
        normed = self.norm_1(x_BTD)
        q = self.q(normed).view(b, t, self.heads, self.size).transpose(1, 2)
        k, v = self.kv(normed).view(b, t, 2, self.kv_heads, self.size).permute(2, 0, 3, 1, 4)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        k, v = (part.repeat_interleave(self.heads // self.kv_heads, 1) for part in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(mixed.transpose(1, 2).reshape(b, t, -1))
        normed = self.norm_2(x_BTD)
        out: Tensor = x_BTD + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return out


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


class Llama(nn.Module):
    """A decoder of such blocks; the angles of the rotary embedding are computed in the step."""

    def __init__(self, vocabulary: int, width: int, depth: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(_LlamaBlock(width, heads, kv_heads) for _ in range(depth))
        self.norm, self.head = _RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        device = tokens_BT.device
        inverse = 1e4 ** (-torch.arange(0, self.size, 2, device=device) / self.size)
        angles = torch.outer(torch.arange(tokens_BT.shape[1], device=device).float(), inverse)
        angles = torch.cat([angles, angles], -1)
        cos, sin = angles.cos(), angles.sin()
        x_BTD = self.tokens(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, cos, sin)
        return _token_loss(self.head(self.norm(x_BTD)), targets_BT)


class _LoRALinear(nn.Module):
    """A frozen layer and a trained product of two narrow ones."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, frozen.in_features) / rank)
        self.b = nn.Parameter(torch.zeros(frozen.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.frozen(x) + 2.0 * (x @ self.a.t() @ self.b.t())
        return out


class Encoder(nn.Module):
    """A text classifier of nn.TransformerEncoderLayer, each run as it is or checkpointed."""

    def __init__(self, vocabulary: int, width: int, depth: int, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, NUM_CLASSES)

    def forward(self, tokens_BT: Tensor, labels: Tensor) -> Tensor:
        x_BTD = self.tokens(tokens_BT)
        for layer in self.layers:
            if self.checkpointed:
                x_BTD = checkpoint(layer, x_BTD, use_reentrant=False)
            else:
                x_BTD = layer(x_BTD)
        return F.cross_entropy(self.head(x_BTD.mean(1)), labels)


def lora() -> nn.Module:
    """Return a frozen encoder whose feed-forward layers and head are tuned."""
    model = Encoder(256, 128, 3).requires_grad_(False)
    for layer in model.layers:
        assert isinstance(layer, nn.TransformerEncoderLayer)
        for name in ("linear1", "linear2"):
            setattr(layer, name, _LoRALinear(getattr(layer, name), 8))
    model.head.requires_grad_(True)
    return model
