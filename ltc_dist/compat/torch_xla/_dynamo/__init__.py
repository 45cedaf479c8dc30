"""`torch_xla._dynamo`: what is beneath `torch.compile` there. Here such calls are recorded like every other one."""
