"""lazy_tensor_core, as its API guide shows it."""

import lazy_tensor_core
import lazy_tensor_core.core.lazy_model as ltm
import torch
from samples import batches, net, tell

device = ltm.lazy_device()
model = net().train().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(2):
    for data, target in batches():
        optimizer.zero_grad()
        data, target = data.to(device), target.to(device)
        loss = torch.nn.functional.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        ltm.mark_step()
        losses.append(loss.item())
ltm.save(model.state_dict(), "model.pt")
tell(
    losses=losses,
    device=str(device),
    kb=ltm.get_memory_info(device)["kb_total"],
    v=lazy_tensor_core.__version__,
)
