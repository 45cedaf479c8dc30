"""Fine-tuning with the Trainer of transformers: evaluation, a checkpoint in the middle, and what is left after it."""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

directory = sys.argv[1]
config = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 50, "n_positions": 32}
config |= {"bos_token_id": 0, "eos_token_id": 0}
config |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
generator = torch.Generator().manual_seed(1)
tokens = [torch.randint(0, 50, (16,), generator=generator) for _ in range(64)]
data = [{"input_ids": t, "labels": t} for t in tokens]


def train(steps: int, resumes: bool) -> Trainer:
    torch.manual_seed(0)
    arguments = TrainingArguments(
        directory,
        use_cpu="--cpu" in sys.argv,
        per_device_train_batch_size=4,
        max_steps=steps,
        logging_steps=2,
        save_steps=4,
        eval_strategy="steps",
        eval_steps=4,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        report_to=[],
        disable_tqdm=True,
    )
    model = GPT2LMHeadModel(GPT2Config(**config))
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:16])
    trainer.train(resume_from_checkpoint=resumes or None)
    return trainer


train(4, resumes=False)
trainer = train(8, resumes=True)
log = trainer.state.log_history
losses = [round(row[key], 4) for row in log for key in ("loss", "eval_loss") if key in row]
trainer.save_model(f"{directory}/model")
arguments = trainer.args
if arguments.process_index == 0:
    saved = GPT2LMHeadModel.from_pretrained(f"{directory}/model").state_dict()
    weights = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    assert all(torch.equal(saved[name], tensor.cpu()) for name, tensor in weights.items())
    print("result", arguments.device.type, arguments.world_size, losses)
if "--cpu" in sys.argv and torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()  # else a thread of gloo may abort the process at exit
