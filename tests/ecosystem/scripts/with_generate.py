"""Texts from tiny models of transformers: greedy, beams, sampling, caches of both kinds; variable lengths."""

import sys

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

WAYS = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "sampled": {"do_sample": True, "top_k": 20},
    "static cache": {"cache_implementation": "static"},
}


def models() -> dict[str, torch.nn.Module]:
    torch.manual_seed(0)
    gpt = GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=300)
    llama = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=300,
    )
    t5 = T5Config(
        d_model=64, d_ff=128, num_layers=2, num_heads=4, d_kv=16, vocab_size=300, decoder_start_token_id=0
    )  # fmt: skip
    return {
        "gpt2": GPT2LMHeadModel(gpt),
        "llama": LlamaForCausalLM(llama),
        "t5": T5ForConditionalGeneration(t5),
    }


def num_programs() -> int:
    if "--cpu" in sys.argv:
        return 0
    from ltc_core import metrics

    return metrics.counter_value("UncachedCompile") or 0


def main() -> None:
    device = torch.device("cpu" if "--cpu" in sys.argv else "ltc")
    draw = torch.Generator().manual_seed(1)
    found = []
    most = 0
    for name, model in models().items():
        model = model.eval().to(device)
        for way, options in WAYS.items():
            if name == "t5" and way == "static cache":
                continue
            before = num_programs()
            for length in (5, 9):
                words = torch.randint(3, 300, (2, length), generator=draw).to(device)
                torch.manual_seed(length)
                made = model.generate(
                    words, max_new_tokens=24, min_new_tokens=24, pad_token_id=1, **options
                )
                found.append(made.cpu().sum(1).tolist())
            most = max(most, num_programs() - before)
    assert most <= 24, f"{most} programs for 2 texts of 24 tokens"
    print(f"result {device.type} 1 {found}")


if __name__ == "__main__":
    main()
