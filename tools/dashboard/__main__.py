"""`python -m tools.dashboard`: write deploy/grafana/dashboards/foreword.json; `--check` only compares."""

import json
import sys
from pathlib import Path

from tools.dashboard.grafana import dashboard
from tools.dashboard.panels import ROWS, VARIABLES

TARGET = Path(__file__).resolve().parents[2] / "deploy/grafana/dashboards/foreword.json"


def main() -> int:
    text = json.dumps(dashboard(ROWS, VARIABLES), indent=2, ensure_ascii=False) + "\n"
    if "--check" in sys.argv:
        same = TARGET.is_file() and TARGET.read_text(encoding="utf-8") == text
        if not same:
            print("the dashboard is not that of tools/dashboard/panels.py: run python -m tools.dashboard")
        return int(not same)
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
