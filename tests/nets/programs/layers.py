"""Losses, norms, layers with state, packed sequences, attention."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import rnn

from tests.core.beside_eager import attempt

Device = torch.device


def numbers(device: Device, *shape: int) -> torch.Tensor:
    n = torch.Size(shape).numel()
    return (torch.arange(float(n)) * 37 % 23 / 7 - 1.5).view(shape).to(device)


def trained(module: nn.Module, device: Device, *inputs: torch.Tensor, steps: int = 2) -> Any:
    module = module.to(device)
    opt, found = torch.optim.SGD(module.parameters(), lr=0.05), []
    for _ in range(steps):
        opt.zero_grad()
        out = module(*inputs)
        out = out[0] if isinstance(out, tuple) else out
        out.float().square().mean().backward()
        opt.step()
        found.append(out)
    return found, dict(module.state_dict())


def losses_of_classes(device: Device) -> Any:
    x, y = numbers(device, 4, 5).requires_grad_(), torch.tensor([0, 4, 2, -100], device=device)
    weight = torch.arange(5.0, device=device)
    found = [
        F.cross_entropy(x, y), F.cross_entropy(x, y, weight, label_smoothing=0.1),
        F.cross_entropy(x, y, reduction="none"), F.nll_loss(x.log_softmax(1), y, weight),
        F.cross_entropy(x, x.softmax(1).detach()), F.multi_margin_loss(x[:3], y[:3]),
    ]  # fmt: skip
    sum(f.sum() for f in found).backward()
    return (
        found,
        x.grad,
        attempt(lambda: F.cross_entropy(x, y + 5)),
        attempt(lambda: F.cross_entropy(x, y[:2])),
    )


def losses_of_values(device: Device) -> Any:
    x, y = numbers(device, 4, 3).requires_grad_(), numbers(device, 4, 3).flip(0)
    found = [
        F.mse_loss(x, y), F.l1_loss(x, y, reduction="sum"), F.smooth_l1_loss(x, y, beta=0.5),
        F.huber_loss(x, y, delta=0.3), F.binary_cross_entropy_with_logits(x, y.sigmoid(), pos_weight=y[0].abs()),
        F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"),
        F.binary_cross_entropy(x.sigmoid(), y.sigmoid()), F.gaussian_nll_loss(x, y, y.abs() + 1),
        F.poisson_nll_loss(x, y.abs()), F.soft_margin_loss(x, y.sign()),
        F.cosine_embedding_loss(x, y, y[:, 0].sign()), F.margin_ranking_loss(x[0], x[1], y[0].sign()),
        F.triplet_margin_loss(x, y, y.flip(0)), F.hinge_embedding_loss(x, y.sign()),
        F.multilabel_soft_margin_loss(x, (y > 0).float()),
    ]  # fmt: skip
    sum(found).backward()
    return found, x.grad


def ctc(device: Device) -> Any:
    x = numbers(device, 6, 2, 4).log_softmax(-1).requires_grad_()
    loss = F.ctc_loss(
        x, torch.tensor([[1, 2], [3, 1]], device=device), torch.tensor([6, 5]), torch.tensor([2, 1])
    )
    loss.backward()
    one = F.ctc_loss(x[:, 0], torch.tensor([1, 2], device=device), torch.tensor(6), torch.tensor(2))
    return loss, x.grad, one


def bce_out_of_range(device: Device) -> Any:
    x = numbers(device, 3)
    return (
        attempt(lambda: F.binary_cross_entropy(x, x)),
        attempt(lambda: F.mse_loss(x, x.bool())),
        x,
    )


def norms(device: Device) -> Any:
    x = numbers(device, 2, 4, 3, 3)
    return [
        trained(layer, device, x)
        for layer in (
            nn.BatchNorm2d(4),
            nn.GroupNorm(2, 4),
            nn.InstanceNorm2d(4, affine=True),
            nn.LayerNorm([4, 3, 3]),
            nn.RMSNorm(3),
        )
    ]


def batch_norm_in_all_modes(device: Device) -> Any:
    x, found = numbers(device, 4, 3), []
    for kwargs in (
        {},
        {"momentum": None},
        {"track_running_stats": False},
        {"affine": False, "momentum": 0.5},
    ):
        bn = nn.BatchNorm1d(3, **kwargs).to(device)
        for _ in range(3):
            bn(x + 1)
        bn.eval()
        found += [bn(x), dict(bn.state_dict())]
    return found, attempt(lambda: nn.BatchNorm1d(3).to(device)(x[:1]))


def batch_norm_in_one_graph(device: Device) -> Any:
    bn = nn.BatchNorm1d(3).to(device)
    mean, var = bn.running_mean, bn.running_var
    x = numbers(device, 4, 3)
    for k in range(3):
        F.batch_norm(x * (k + 1), mean, var, training=True, momentum=0.1 * (k + 1))
    return mean, var, F.batch_norm(x, mean, var)


def convolutions(device: Device) -> Any:
    x = numbers(device, 2, 4, 8, 8)
    layers = [
        nn.Conv2d(4, 6, 3, padding=1), nn.Conv2d(4, 4, 3, groups=4, stride=2), nn.ConvTranspose2d(4, 2, 2, stride=2),
        nn.Conv2d(4, 2, 3, dilation=2, bias=False), nn.Conv2d(4, 4, 3, padding="same", padding_mode="reflect"),
    ]  # fmt: skip
    return [trained(layer, device, x) for layer in layers], attempt(lambda: layers[0](x[:, :2]))


def convolutions_of_other_dims(device: Device) -> Any:
    return (
        trained(nn.Conv1d(3, 2, 3), device, numbers(device, 2, 3, 8)),
        trained(nn.Conv3d(1, 2, 2), device, numbers(device, 1, 1, 3, 3, 3)),
        trained(nn.ConvTranspose1d(3, 2, 3, output_padding=1, stride=2), device, numbers(device, 2, 3, 4)),
    )  # fmt: skip


def channels_last_networks(device: Device) -> Any:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)).to(
        device
    )
    model = model.to(memory_format=torch.channels_last)
    return trained(
        model, device, numbers(device, 2, 3, 6, 6).contiguous(memory_format=torch.channels_last)
    )


def channels_last_in_all_layers(device: Device) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.GELU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, groups=2),
        nn.Hardswish(), nn.ConvTranspose2d(4, 4, 2, stride=2), nn.Upsample(scale_factor=2), nn.ReplicationPad2d(1),
        nn.AvgPool2d(2), nn.Dropout2d(0.0), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 2),
    ).to(device, memory_format=torch.channels_last)  # fmt: skip
    x = numbers(device, 2, 3, 8, 8).contiguous(memory_format=torch.channels_last).requires_grad_()
    found, out = [], x
    for layer in model:
        out = layer(out)
        found += [out, out.flatten(1), out.contiguous(), out.clone()]
        if out.dim() == 4:
            found.append(out.is_contiguous(memory_format=torch.channels_last))
    out.square().sum().backward()
    return found, x.grad, [(p, p.grad) for p in model.parameters()]


def pools(device: Device) -> Any:
    x = numbers(device, 2, 3, 8, 8).requires_grad_()
    found = [
        F.max_pool2d(x, 2), F.avg_pool2d(x, 3, 2, 1), F.adaptive_avg_pool2d(x, 3), F.adaptive_max_pool2d(x, 2),
        F.lp_pool2d(x.abs() + 1, 2, 2), F.max_pool2d(x, 2, return_indices=True)[0],
        F.pixel_shuffle(x[:, :1].expand(2, 4, 8, 8), 2), F.fractional_max_pool2d(x, 2, 3),
    ]  # fmt: skip
    sum(f.square().sum() for f in found).backward()
    values, places = F.max_pool2d(x, 2, return_indices=True)
    return found, x.grad, F.max_unpool2d(values, places, 2)


def resizing(device: Device) -> Any:
    x = numbers(device, 1, 2, 4, 4).requires_grad_()
    found = [
        F.interpolate(x, scale_factor=2, mode=m) for m in ("nearest", "bilinear", "bicubic", "area")
    ]
    grid = F.affine_grid(torch.eye(2, 3, device=device)[None], [1, 2, 5, 5], align_corners=False)
    found += [
        F.grid_sample(x, grid, align_corners=False),
        F.pad(x, (1, 1), "reflect"),
        F.pad(x, (1, 0, 2, 0), value=3),
        F.unfold(x, 2),
    ]
    sum(f.square().sum() for f in found).backward()
    return found, x.grad


def activations(device: Device) -> Any:
    x = numbers(device, 4, 4).requires_grad_()
    names = "relu6 elu selu celu gelu silu mish hardswish hardsigmoid hardtanh leaky_relu softplus softsign"
    names += " tanhshrink softshrink glu logsigmoid"
    found = [getattr(F, name)(x) for name in names.split()] + [
        F.gelu(x, approximate="tanh"),
        F.prelu(x, x[0, :1]),
        F.gumbel_softmax(x),
    ]
    sum(f.square().sum() for f in found).backward()
    return found, x.grad, F.rrelu(x, training=False)


def dropouts(device: Device) -> Any:
    x = numbers(device, 2, 4, 3, 3)
    return (
        F.dropout(x),
        F.dropout2d(x),
        F.alpha_dropout(x),
        F.dropout(x, training=False),
        F.dropout1d(x[0]),
        F.dropout(x, 1.0),
    )


def recurrent_layers(device: Device) -> Any:
    x = numbers(device, 3, 5, 4)
    return [
        trained(layer, device, x)
        for layer in (
            nn.LSTM(4, 3, 2, batch_first=True),
            nn.GRU(4, 3, bidirectional=True),
            nn.RNN(4, 3),
            nn.LSTM(4, 3, proj_size=2),
        )
    ]


def recurrent_cells(device: Device) -> Any:
    cell, x = nn.LSTMCell(4, 3).to(device), numbers(device, 5, 2, 4)
    h = c = torch.zeros(2, 3, device=device)
    for step in x:
        h, c = cell(step, (h, c))
    (h.sum() + c.sum()).backward()
    return h, c, [p.grad for p in cell.parameters()]


def packed_sequences(device: Device) -> Any:
    lstm, x = nn.LSTM(4, 3, batch_first=True).to(device), numbers(device, 3, 5, 4).requires_grad_()
    packed = rnn.pack_padded_sequence(x, torch.tensor([5, 3, 2]), batch_first=True)
    out, (h, c) = lstm(packed)
    padded, lengths = rnn.pad_packed_sequence(out, batch_first=True, padding_value=-1)
    padded.sum().backward()
    return padded, lengths, h, c, x.grad, packed.data, packed.batch_sizes


def packed_sequences_out_of_order(device: Device) -> Any:
    gru, x = nn.GRU(4, 3, bidirectional=True).to(device), numbers(device, 5, 3, 4)
    packed = rnn.pack_padded_sequence(x, [2, 5, 3], enforce_sorted=False)
    out, h = gru(packed)
    return (
        rnn.pad_packed_sequence(out, total_length=6),
        h,
        attempt(lambda: rnn.pack_padded_sequence(x, [2, 5, 3])),
    )


def sequences_of_lists(device: Device) -> Any:
    xs = [numbers(device, n, 2) for n in (3, 1, 2)]
    packed = rnn.pack_sequence(xs, enforce_sorted=False)
    return (
        rnn.pad_sequence(xs, batch_first=True),
        packed.data,
        rnn.unpack_sequence(packed),
        packed.to(device).data,
    )


def transformers_in_eval(device: Device) -> Any:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).to(device).eval()
    mask = torch.tensor([[False, False, True], [False, False, False]], device=device)
    x = numbers(device, 2, 3, 8)
    with torch.no_grad():
        a = model(x, src_key_padding_mask=mask)
    return a, model(x, src_key_padding_mask=mask), model(x)


def transformers_in_training(device: Device) -> Any:
    torch.manual_seed(0)
    model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True).to(device)
    torch.manual_seed(1)
    x = numbers(device, 2, 3, 8)
    causal = nn.Transformer.generate_square_subsequent_mask(3, device=device)
    out = model(x, x + 1, tgt_mask=causal, tgt_is_causal=True)
    out.sum().backward()
    return out, [p.grad for p in model.parameters()][:4]


def multihead_attention(device: Device) -> Any:
    torch.manual_seed(0)
    layer, x = nn.MultiheadAttention(8, 2, batch_first=True).to(device), numbers(device, 2, 3, 8)
    mask = torch.tensor([[False, True, True], [False, False, False]], device=device)
    return layer(x, x, x), layer(x, x, x, key_padding_mask=mask), layer(x, x, x, need_weights=False)


def multihead_attention_in_inference(device: Device) -> Any:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, batch_first=True).to(device).eval()
    x = numbers(device, 2, 3, 8)
    padding = torch.tensor([[False, True, True], [False, False, False]], device=device)
    causal = torch.ones(3, 3, device=device).triu(1).bool()
    with torch.no_grad():
        return [
            layer(x, x, x), layer(x, x, x, need_weights=False), layer(x, x, x, average_attn_weights=False),
            layer(x, x, x, key_padding_mask=padding, need_weights=False),
            layer(x, x, x, attn_mask=causal, is_causal=True, need_weights=False), layer(x[0], x[0], x[0]),
        ]  # fmt: skip


def narrow_layers(device: Device) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.GroupNorm(2, 8), nn.Linear(8, 3)
    )
    model = model.to(device).to(torch.bfloat16)
    x = numbers(device, 2, 4).to(torch.bfloat16)
    out = model(x)
    F.cross_entropy(out.float(), torch.tensor([0, 2], device=device)).backward()
    dtypes = [p.grad.dtype for p in model.parameters()]
    return out.dtype, dtypes, attempt(lambda: model(x.float())), F.mse_loss(out, out.float()).dtype


def attention_in_all_forms(device: Device) -> Any:
    q = numbers(device, 2, 2, 4, 8).requires_grad_()
    mask = torch.ones(4, 4, device=device).tril().bool()
    found = [
        F.scaled_dot_product_attention(q, q, q), F.scaled_dot_product_attention(q, q, q, is_causal=True),
        F.scaled_dot_product_attention(q, q, q, mask),
        F.scaled_dot_product_attention(q, q, q, mask.float(), scale=0.5),
        F.scaled_dot_product_attention(q, q[:, :1], q[:, :1], enable_gqa=True),
    ]  # fmt: skip
    sum(f.square().sum() for f in found).backward()
    return found, q.grad


def embeddings(device: Device) -> Any:
    layer = nn.Embedding(5, 3, padding_idx=0, max_norm=1.0).to(device)
    i = torch.tensor([[0, 2], [4, 2]], device=device)
    out = layer(i)
    out.sum().backward()
    bag = nn.EmbeddingBag(5, 3, mode="sum").to(device)
    return (
        out,
        layer.weight,
        layer.weight.grad,
        bag(i),
        bag(i, per_sample_weights=torch.ones(2, 2, device=device)),
    )


def mixtures_of_experts(device: Device) -> Any:
    x, experts = numbers(device, 6, 4), [nn.Linear(4, 4).to(device) for _ in range(3)]
    weights, chosen = (x @ numbers(device, 4, 3)).softmax(-1).topk(2)
    out, counts = torch.zeros_like(x), []
    for k, expert in enumerate(experts):
        row, slot = torch.where(chosen == k)
        counts.append(len(row))
        out.index_add_(0, row, expert(x[row]) * weights[row, slot, None])
    out.sum().backward()
    return out, counts, [e.weight.grad for e in experts], chosen.flatten().bincount(minlength=3)


def bilinear_and_distance_layers(device: Device) -> Any:
    x = numbers(device, 3, 4)
    return (
        trained(nn.Bilinear(4, 4, 2), device, x, x + 1), F.cosine_similarity(x, x + 1),
        F.pairwise_distance(x, x + 1), F.pdist(x), F.normalize(x), F.local_response_norm(x[None], 2),
        nn.Flatten()(x[None]), nn.Unflatten(1, (2, 2))(x),
    )  # fmt: skip
