"""Runs programs side by side, a few at a time, until a deadline: what each printed comes in one piece when it ends.

Knows processes and nothing of what they do. Each has a session of its own, so that one which is ended takes along
whatever it has started; so does an interrupt, which ends them all.

    ended = run_all({"a": Job(["sh", "-c", "echo a"]), "b": Job(["false"])}, deadline=time.monotonic() + 60, at_once=8)
    ended["b"].code        # 1
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Job:
    """A program with its arguments, and what its environment has besides ours."""

    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """How a program ended: its exit code, all it printed, how long it took. `in_time` is False if it was ended."""

    code: int
    output: str
    seconds: float
    in_time: bool


def run_all(jobs: Mapping[str, Job], deadline: float, at_once: int) -> dict[str, Ended]:
    """Run every job, at most `at_once` at a time; those not begun at the deadline (of time.monotonic) get code -1."""
    waiting, running, ended = dict(jobs), dict[str, _Running](), dict[str, Ended]()
    with tempfile.TemporaryDirectory() as folder:
        try:
            while waiting or running:
                late = time.monotonic() > deadline
                while waiting and (late or len(running) < at_once):
                    name = next(iter(waiting))
                    job = waiting.pop(name)
                    if late:
                        ended[name] = Ended(-1, "was not run: the time of this part was used up\n", 0.0, False)
                    else:
                        running[name] = _Running(job, Path(folder) / str(len(jobs) - len(waiting)))
                for name in [name for name, program in running.items() if program.is_over(late)]:
                    ended[name] = running.pop(name).ended()
                    _show(name, jobs[name], ended[name])
                time.sleep(POLL_SECONDS if running else 0)
        finally:
            for program in running.values():
                program.kill()
    return {name: ended[name] for name in jobs}


class _Running:
    """One program at work. It prints into a file: a pipe that nobody reads would stop it when it is full."""

    def __init__(self, job: Job, log: Path) -> None:
        self.began, self.log, self.killed = time.monotonic(), log, False
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                job.command,
                env={**os.environ, **job.environment},
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def is_over(self, late: bool) -> bool:
        if late and self.process.poll() is None:
            self.kill()
        return self.process.poll() is not None

    def kill(self) -> None:
        self.killed = True
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has ended by itself meanwhile
            self.killed = False
        self.process.wait()

    def ended(self) -> Ended:
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return Ended(self.process.wait(), text, time.monotonic() - self.began, not self.killed)


def _show(name: str, job: Job, ended: Ended) -> None:
    how = f"exit code {ended.code}" if ended.in_time else "ended: its time was used up"
    print(f"--- {name}: {how} after {ended.seconds:.0f} s: {' '.join(job.command)}\n{ended.output}", end="", flush=True)
