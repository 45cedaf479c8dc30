"""What a training loop in a job calls: the step, batch normalisation, ZeRO, DataParallel, rates."""
