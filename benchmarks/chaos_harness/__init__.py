"""Parts of `benchmarks.chaos`: the service under test, what is done to it, and how its state is judged."""
