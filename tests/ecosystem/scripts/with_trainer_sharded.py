"""The Trainer of transformers as a TPU script has it, with divided parameters: DIRECTORY [--plain]."""

import glob
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

directory = sys.argv[1]
is_plain = "--plain" in sys.argv
config = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 50, "n_positions": 32}
config |= {"bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False}
config |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
generator = torch.Generator().manual_seed(1)
tokens = [torch.randint(0, 50, (16,), generator=generator) for _ in range(64)]
data = [{"input_ids": t, "labels": t} for t in tokens]


class ShardedTrainer(Trainer):
    def _wrap_model(self, model, *args, **kwargs):
        """The Trainer of transformers 5.24 makes no optimizer for what it has wrapped itself."""
        wrapped = super()._wrap_model(model, *args, **kwargs)
        if self.optimizer is None:
            self.create_optimizer(wrapped)
        return wrapped


torch.manual_seed(0)
wraps = {"xla": True, "transformer_layer_cls_to_wrap": ["GPT2Block"], "xla_fsdp_grad_ckpt": True}
arguments = TrainingArguments(
    directory,
    per_device_train_batch_size=4,
    max_steps=6,
    logging_steps=1,
    save_steps=6,
    learning_rate=1e-2,
    max_grad_norm=0,  # it clips by the norm of a process's own shards
    report_to=[],
    disable_tqdm=True,
    **({} if is_plain else {"fsdp": "full_shard auto_wrap", "fsdp_config": wraps}),
)
trainer = ShardedTrainer(GPT2LMHeadModel(GPT2Config(**config)), arguments, train_dataset=data)
trainer.train()
losses = [round(row["loss"], 4) for row in trainer.state.log_history if "loss" in row]
if arguments.process_index == 0:
    saved = GPT2LMHeadModel.from_pretrained(f"{directory}/checkpoint-6")  # made whole
    assert sum(p.numel() for p in saved.parameters()) == sum(
        p.numel() for p in GPT2LMHeadModel(saved.config).parameters()
    )
    shards = len(glob.glob(f"{directory}/checkpoint-6/rank*-pytorch_model.bin"))
    assert shards == (0 if is_plain else 2)
    with torch.no_grad():
        batch = torch.stack(tokens[:4])
        loss = saved(input_ids=batch, labels=batch).loss.item()
    print("result", arguments.device.type, arguments.world_size, losses, round(loss, 3))
