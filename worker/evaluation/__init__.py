"""Runs an evaluation: two models → both their answers to the same prompts (`answering`, the real engine, one after the
other) → their log-likelihoods under the base (`scoring`) → files (`run`). `apar.evaluation` does the counting.
"""
