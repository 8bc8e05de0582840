"""The parts of `python -m benchmarks.replay`: real answers replayed through the real engine, forked and not.

The way through: `trees` cuts an answer's text into threads, `scripts` has their tokens, `limits` counts without an
engine what forking could save, `workload` makes the requests of both sides. `sides` starts a side in a process, checks
its outputs; there `engine` runs them on a model of `shapes`, `forced` makes vLLM sample the script, `counting` watches
the scheduler. `report` makes the figures, `projection` turns the steps into GPU time and `plots` draws.
"""
