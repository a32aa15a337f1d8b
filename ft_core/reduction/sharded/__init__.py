"""Gradients of models that FSDP2 shards inside a replica group: each rank averages its shards over the groups."""
