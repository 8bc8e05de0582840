"""Runs the benchmarks one after the other: `make bench`. Each can be run alone, with options (--help)."""

import subprocess
import sys

BENCHMARKS = (
    ["benchmarks.data_layer", "--rows", "200000", "--json"],
    ["benchmarks.service", "--rows", "400", "--json"],
    ["benchmarks.scheduler_overhead", "--json"],
    ["benchmarks.random_groups", "--groups", "400", "--json"],
)


def main() -> int:
    for command in BENCHMARKS:
        print(f"== python -m {' '.join(command)}", flush=True)
        code = subprocess.run([sys.executable, "-m", *command], check=False).returncode
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
