"""`make bench`: every benchmark that needs no GPU, in turn, then the README's tables from what they wrote."""

import subprocess
import sys
from pathlib import Path

from engine.threads import share_cores

ROOT = Path(__file__).resolve().parent.parent
STEPS = (
    ("-m", "loadtests.ingest"),
    ("-m", "loadtests.kv_store"),
    ("-m", "loadtests.http_api"),
    ("-m", "loadtests.engine_cpu"),
    ("-m", "loadtests.metrics_overhead"),
    ("tools/readme_tables.py",),
)


def main() -> int:
    share_cores()
    failed = []
    for step in STEPS:
        print(f"\n=== python {' '.join(step)}", flush=True)
        if subprocess.run([sys.executable, *step], cwd=ROOT).returncode:
            failed.append(" ".join(step))
    for step in failed:
        print(f"failed: {step}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
