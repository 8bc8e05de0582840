"""`forq up` with as many workers as the plan says, each a `worker_entry`; all else is the command itself.

python -m benchmarks.chaos_harness.up_entry up --model ALIAS
"""

import sys
from dataclasses import replace

from benchmarks.chaos_harness.plan import Plan, folder_in
from jobs import cli, supervisor
from jobs.supervisor import Part, Supervisor


class ChaosSupervisor(Supervisor):
    def _make_parts(self) -> list[Part]:
        plan = Plan.load(folder_in(self.settings.home))
        worker, *others = super()._make_parts()
        command = [sys.executable, "-m", "benchmarks.chaos_harness.worker_entry", "--model", self.model]
        return [*(replace(worker, command=command) for _ in range(plan.workers)), *others]


if __name__ == "__main__":
    supervisor.Supervisor = ChaosSupervisor  # type: ignore[misc]
    cli.main()
