"""A worker process: one vLLM engine, fed by all the shards it has leased at once."""
