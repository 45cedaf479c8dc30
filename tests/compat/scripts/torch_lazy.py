"""torch._lazy, as its documents show it."""

import torch
import torch._lazy
import torch._lazy.metrics
import torch._lazy.ts_backend
from samples import batches, net, tell

torch._lazy.ts_backend.init()
model = net().to("lazy")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(2):
    for x, y in batches():
        optimizer.zero_grad(set_to_none=True)
        loss = torch.nn.functional.cross_entropy(model(x.to("lazy")), y.to("lazy"))
        loss.backward()
        optimizer.step()
        torch._lazy.mark_step()
        losses.append(loss.detach())
torch._lazy.wait_device_ops()
names = torch._lazy.metrics.counter_names()
tell(
    losses=torch._lazy.to_cpu(torch.stack(losses)).tolist(),
    lazy=any(n.startswith("lazy::") for n in names),
)
