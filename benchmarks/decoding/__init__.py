"""The parts of `benchmarks.decoders`: prompts, runs, figures, plots. Needs torch and transformers, never vLLM."""
