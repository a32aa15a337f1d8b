"""`Trainer(strategy="fault_tolerant")`: the strategy and its parts."""
