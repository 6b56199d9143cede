"""Write the README's tables from measured results and declared settings; `--check` only compares."""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"


def main() -> int:
    before = README.read_text(encoding="utf-8")
    after = before
    for name, table in {"results": results_table(), "settings": settings_table()}.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        after, count = re.subn(pattern, lambda match, table=table: match[1] + table + match[2], after, flags=re.DOTALL)
        if count != 1:
            sys.exit(f"README.md needs one <!-- {name} --> section, has {count}")
    if "--check" in sys.argv:
        if after != before:
            print("README.md's tables are not those of the results and settings: run tools/readme_tables.py")
        return int(after != before)
    README.write_text(after, encoding="utf-8")
    return 0


def results_table() -> str:
    """One row a headline figure, in the file's order."""
    entries = json.loads((ROOT / "loadtests/results/summary.json").read_text(encoding="utf-8"))
    rows = ["| figure | value | where | measured by |", "| --- | --- | --- | --- |"]
    for entry in entries:
        value = f"{entry['value']:.4g} {entry['unit']}".strip()
        rows.append(f"| {entry['name']} | {value} | {entry['device']}, {entry['date'][:10]} | `{entry['command']}` |")
    return "\n".join(rows) + "\n"


def settings_table() -> str:
    from service.settings import Settings

    rows = ["| variable | default | meaning |", "| --- | --- | --- |"]
    for name, field in Settings.model_fields.items():
        rows.append(f"| `FOREWORD_{name.upper()}` | `{field.default}` | {field.description} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.exit(main())
