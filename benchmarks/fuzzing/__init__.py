"""The parts of `benchmarks.fuzz`: whole inputs, and what is done to them."""
