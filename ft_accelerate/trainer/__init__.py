"""transformers.Trainer with fault tolerance: `FaultTolerantTrainer`, and the mixin for subclasses of Trainer."""
