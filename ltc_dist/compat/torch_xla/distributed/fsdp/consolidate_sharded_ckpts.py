"""`python -m torch_xla.distributed.fsdp.consolidate_sharded_ckpts`: one model of the shards of all processes."""

from ltc_dist.fully_sharded.consolidate import consolidate_sharded_model_checkpoints, main

__all__ = ["consolidate_sharded_model_checkpoints", "main"]

if __name__ == "__main__":
    main()
