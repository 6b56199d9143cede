"""What the trace of `loadtests.zygote` says: who was inside what when it was killed, and who went on with it."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Line:
    at: float  # monotonic seconds, the same for all processes
    process: int
    event: str  # claimed | committing | committed | refused | left
    kind: str
    job: str
    attempt: int


@dataclass
class Trace:
    """Read on with `update`; jobs that a process has in hand, and all commits so far."""

    path: Path
    lines: list[Line] = field(default_factory=list)
    commits: Counter[str] = field(default_factory=Counter)
    _open: dict[int, dict[str, str]] = field(default_factory=dict)  # process → job → where it is
    _offset: int = 0

    def update(self) -> None:
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for text in whole.decode().splitlines():
            at, process, event, kind, job, attempt = text.split()
            line = Line(float(at), int(process), event, kind, job, int(attempt))
            self.lines.append(line)
            jobs = self._open.setdefault(line.process, {})
            if event == "claimed":
                jobs[job] = kind
            elif event in ("committing", "committed"):
                jobs[job] = "commit"
                self.commits[job] += event == "committed"
            else:
                jobs.pop(job, None)

    def inside(self, process: int) -> dict[str, str]:
        """job → ingest, prefill, answer or commit."""
        return dict(self._open.get(process, {}))

    def ended(self, process: int) -> None:
        self._open.pop(process, None)

    def taken_over_at(self, job: str, after: float, process: int) -> float | None:
        """When another process claimed it again; None where it didn't, or where the claim behind the kill left no line
        (its process was killed between the two)."""
        attempt = max(line.attempt for line in self.lines if line.job == job and line.process == process)
        for line in self.lines:
            if line.job == job and line.event == "claimed" and line.at > after and line.process != process:
                return line.at if line.attempt == attempt + 1 else None
        return None
