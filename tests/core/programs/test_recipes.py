"""Ways of training beside the plain loop: GAN, policy gradient, meta-learning, CTC, seq2seq, EMA.

Each is run beside eager PyTorch, step by step with mark_step, and what it may not do is pinned:
a step that reads no value is cut once.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ltc_core as ltc
from tests.core.beside_eager import beside_eager
from tests.core.counting import Counting

pytestmark = pytest.mark.usefixtures("marked_steps")

D = torch.distributions
aten = torch.ops.aten


def end_step(device: torch.device) -> None:
    if device.type != "cpu":
        ltc.mark_step()


def gan(device: torch.device) -> Any:
    generator, critic = nn.Linear(2, 3).to(device), nn.Linear(3, 1).to(device)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (generator, critic)]
    real, ones = torch.ones(4, 3, device=device), torch.ones(4, 1, device=device)
    losses = []
    for step in range(4):
        fake = generator(torch.full((4, 2), float(step)).to(device))
        optimizers[1].zero_grad()
        critic_loss = F.binary_cross_entropy_with_logits(critic(fake.detach()), 0 * ones)
        critic_loss = critic_loss + F.binary_cross_entropy_with_logits(critic(real), ones)
        critic_loss.backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        loss = F.binary_cross_entropy_with_logits(critic(fake), ones)
        loss.backward()
        optimizers[0].step()
        losses += [critic_loss.detach(), loss.detach()]
        end_step(device)
    return losses


def seq2seq(device: torch.device) -> Any:
    model = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True).to(device)
    source, target = torch.randn(2, 5, 16).to(device), torch.randn(2, 4, 16).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    mask = nn.Transformer.generate_square_subsequent_mask(4, device=device)
    losses = []
    for _ in range(3):
        out = model(source, target, tgt_mask=mask, tgt_is_causal=True)
        loss = F.mse_loss(out, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        end_step(device)
    model.eval()
    with torch.inference_mode():
        return losses, model(source, target).clone()


def meta_learning(device: torch.device) -> Any:
    w = torch.ones(3, device=device, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.1)
    for step in range(3):
        fast: Tensor = w
        for _ in range(3):
            (grad,) = torch.autograd.grad((fast**2 * step).sum(), fast, create_graph=True)
            fast = fast - 0.1 * grad
        optimizer.zero_grad()
        (fast**3).sum().backward()
        optimizer.step()
        end_step(device)
    return w


class Memory(nn.Module):
    """Buffers that are written while training: a counter and a ring of features."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("ring", torch.zeros(4, 2))
        self.next = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.ring[self.next : self.next + 2] = x.detach()
        self.next = (self.next + 2) % 4
        return x @ self.ring.clone().t() / self.count


def ring_of_features(device: torch.device) -> Any:
    memory, encoder = Memory().to(device), nn.Linear(3, 2).to(device)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
    losses = []
    for step in range(5):
        scores = memory(encoder(torch.full((2, 3), float(step)).to(device)))
        loss = F.cross_entropy(scores, torch.tensor([0, 1], device=device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        end_step(device)
    return losses, memory.state_dict()


def teacher_and_student(device: torch.device) -> Any:
    """An exponential average as the teacher, with dropout in the student."""
    student = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 4)).to(device)
    teacher = nn.Sequential(nn.Linear(3, 8), nn.Identity(), nn.ReLU(), nn.Linear(8, 4)).to(device)
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)
    optimizer = torch.optim.AdamW(student.parameters(), lr=0.01)
    torch.manual_seed(1)
    for step in range(4):
        x = torch.full((4, 3), step / 4).to(device)
        loss = F.kl_div(student(x).log_softmax(1), teacher(x).softmax(1), reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for average, p in zip(teacher.parameters(), student.parameters(), strict=True):
                average.lerp_(p, 0.1)
        end_step(device)
    return loss.detach(), list(teacher.parameters())


def variational(device: torch.device) -> Any:
    encoder, decoder = nn.Linear(3, 4).to(device), nn.Linear(2, 3).to(device)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=0.01)
    torch.manual_seed(1)
    losses = []
    for step in range(4):
        x = torch.full((5, 3), step / 4).to(device)
        mean, log_scale = encoder(x).chunk(2, dim=1)
        posterior = D.Normal(mean, log_scale.exp(), validate_args=False)
        prior = D.Normal(torch.zeros_like(mean), torch.ones_like(mean), validate_args=False)
        divergence = D.kl_divergence(posterior, prior).sum(1).mean()
        loss = F.mse_loss(decoder(posterior.rsample()), x) + 0.1 * divergence
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        end_step(device)
    return losses


def experts(device: torch.device) -> Any:
    """Rows go to one of three experts each, and are multiplied in groups: libraries write mixtures of experts so."""
    router = nn.Linear(8, 3).to(device)
    weights = torch.randn(3, 8, 8).to(device).requires_grad_()
    optimizer = torch.optim.AdamW([*router.parameters(), weights], lr=0.01)
    losses = []
    for step in range(4):
        x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step)).to(device)
        scores, chosen = router(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        ends = torch.bincount(chosen, minlength=3).cumsum(0).to(torch.int32)
        out = aten._grouped_mm(x[order], weights, ends) * scores[order].unsqueeze(1)
        optimizer.zero_grad()
        loss = out.square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        end_step(device)
    return losses


ONE_CUT_A_STEP: dict[str, Callable[[torch.device], Any]] = {
    "gan": gan,
    "seq2seq": seq2seq,
    "meta_learning": meta_learning,
    "ring_of_features": ring_of_features,
    "teacher_and_student": teacher_and_student,
    "variational": variational,
}


@pytest.mark.parametrize("name", ONE_CUT_A_STEP)
def test_recipe(name: str) -> None:
    with Counting() as counted:
        beside_eager(ONE_CUT_A_STEP[name], rtol=1e-4, atol=1e-5, rounds=1)
    assert not counted.fallbacks
    assert counted.syncs.keys() <= {"MarkStep", "ToCpu"} and counted.syncs["MarkStep"] >= 3


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this PyTorch multiplies no groups")
def test_a_mixture_of_experts_that_multiplies_groups() -> None:
    with Counting() as counted:
        beside_eager(experts, rtol=1e-4, atol=1e-5, rounds=1)
    assert "_grouped_mm" not in "".join(counted.fallbacks)


def test_policy_gradient() -> None:
    """Actions are read on the host: a cut for each, and the same episode as eager's."""

    def program(device: torch.device) -> Any:
        policy = nn.Linear(2, 3).to(device)
        optimizer = torch.optim.Adam(policy.parameters(), lr=0.05)
        torch.manual_seed(1)
        returns, actions = [], []
        for _ in range(4):
            state, chances = torch.ones(2, device=device), []
            for _ in range(5):
                distribution = D.Categorical(logits=policy(state), validate_args=False)
                action = distribution.sample()
                chances.append(distribution.log_prob(action))
                actions.append(action.item())
                state = state + (0.1 if actions[-1] == 1 else -0.1)
            loss = -(torch.stack(chances) * state.sum().detach()).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            returns.append(loss.detach())
            end_step(device)
        return returns, actions

    with Counting() as counted:
        beside_eager(program, rtol=1e-4, atol=1e-5, rounds=1)
    assert counted.fallbacks == {"_local_scalar_dense": 20}
    assert counted.syncs == {"Item": 20, "MarkStep": 4}


@pytest.mark.parametrize("lengths_on", ["cpu", "device"])
def test_speech(lengths_on: str) -> None:
    def program(device: torch.device) -> Any:
        where = device if lengths_on == "device" else torch.device("cpu")
        x = torch.randn(10, 2, 5).to(device).requires_grad_()
        loss = F.ctc_loss(
            x.log_softmax(2),
            torch.tensor([[1, 2, 3], [2, 1, 1]]).to(device),
            torch.tensor([10, 8]).to(where),
            torch.tensor([3, 2]).to(where),
        )
        loss.backward()
        return loss, x.grad

    with Counting() as counted:
        beside_eager(program, rtol=1e-4, atol=1e-5, rounds=1)
    assert not counted.fallbacks


def test_gradients_of_which_pytorch_knows_no_sizes_end_no_step() -> None:
    def program(device: torch.device) -> Any:
        x = torch.linspace(-1.0, 1.0, 12).reshape(4, 3).to(device).requires_grad_()
        classes = torch.tensor([2, 0, 1, 1], device=device)
        loss = F.multi_margin_loss(x, classes) + F.multilabel_margin_loss(
            x[:, :1], classes[:, None] * 0
        )
        for samples in (torch._standard_gamma(x.exp() + 1), torch._sample_dirichlet(x.exp())):
            assert samples.shape == x.shape and bool((samples > 0).all())
        rates = x.detach().exp()
        gradients = (
            torch._standard_gamma_grad(rates, rates),
            torch._dirichlet_grad(
                rates / rates.sum(1, keepdim=True),
                rates,
                rates.sum(1, keepdim=True).expand_as(rates),
            ),
        )
        loss.backward()
        return loss, x.grad, gradients

    with Counting() as counted:
        beside_eager(program, rtol=1e-4, atol=1e-5, rounds=1)
    assert set(counted.fallbacks) <= {"_local_scalar_dense"}


def test_generating_token_by_token() -> None:
    """A growing sequence: each length is a graph of its own, and the tokens are eager's."""

    def program(device: torch.device) -> Any:
        table, layer = nn.Embedding(7, 8).to(device), nn.GRU(8, 8, batch_first=True).to(device)
        torch.manual_seed(1)
        tokens = torch.tensor([[1]], device=device)
        with torch.no_grad():
            for step in range(6):
                scores = layer(table(tokens))[0][:, -1] @ table.weight.t()
                if step % 2:
                    token = torch.multinomial(scores.softmax(-1), 1)
                else:
                    token = scores.topk(3).indices[:, :1]
                tokens = torch.cat([tokens, token], 1)
                if token.item() == 0:
                    break
        return tokens

    beside_eager(program, rounds=1)
