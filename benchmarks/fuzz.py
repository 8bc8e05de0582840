"""Damaged and hostile inputs through the real submit: only clean errors, in bounded time and memory.

    python -m benchmarks.fuzz --inputs 20000 [--seed S] [--kinds parquet,jsonl,...] [--json]

Each input is submitted to a service of its own in a temporary folder (SQLite; no engine is needed to be refused). It
must be taken, and then each of its rows is a prompt or a one-line error, or be refused with one line. Anything else is
kept under `--keep` with its seed. The last line is JSON: inputs, taken, refused, failures, slowest, peak memory
of the submitting process (its readers are bounded by `limits.submit_memory_bytes`, here 1 GiB).
"""

if __name__ == "__main__":  # every reader imports this module again: nothing may be imported for it
    from benchmarks.fuzzing.run import main

    main()
