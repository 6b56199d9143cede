"""Facts planted in long documents, and how many of them the summary preset recovers over HTTP.

    python -m loadtests.summaries [--documents 4] [--tokens 3000 12000] [--facts 6] [--length long]

Each document is real prose (Python's language reference) with facts of one topic at even depths; the summary is asked
to focus on that topic. A fact counts where its number stands in the summary. The same documents are read at the
default fidelity and densely (`exact`): what sparsity costs is the difference, what the model can't do is in both.
Figures go to loadtests/results/summary.json.
"""

import argparse
import random
import statistics
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pydoc_data import topics
from typing import Any

from loadtests.http.client import Client
from loadtests.http.server import LocalServer
from loadtests.results import write_entry

COMMAND = "python -m loadtests.summaries"
CHARS_PER_TOKEN = 3.9  # of such prose with the default model's tokeniser
FOCUS = "the findings of the survey"
_SUBJECTS = (
    ("the harbor", "ships a year"),
    ("the northern forest", "hectares"),
    ("the old mill", "sacks of flour"),
    ("the city library", "books"),
    ("the railway bridge", "passengers a day"),
    ("the glass factory", "bottles a week"),
    ("the lighthouse", "visitors"),
    ("the botanical garden", "plants"),
    ("the stone quarry", "tons of granite"),
    ("the mountain school", "pupils"),
)


@dataclass(frozen=True)
class Report:
    """A document with its facts: what must stand in a summary for each."""

    name: str
    text: str
    facts: tuple[str, ...]

    def recovered(self, summary: str) -> int:
        """Numbers may be written with separators."""
        plain = summary.replace(",", "").replace(" ", "")
        return sum(fact in plain for fact in self.facts)


def make_report(num_tokens: int, num_facts: int, seed: int) -> Report:
    """About `num_tokens` tokens. Raises ValueError for more facts than there are subjects."""
    if num_facts > len(_SUBJECTS):
        raise ValueError(f"facts: got {num_facts}, expected at most {len(_SUBJECTS)}")
    chance = random.Random(seed)
    size = int(num_tokens * CHARS_PER_TOKEN)
    start = chance.randrange(len(prose()) - size)
    text = prose()[start : start + size]
    facts, parts, last = [], [], 0
    for index, (subject, unit) in enumerate(chance.sample(_SUBJECTS, num_facts)):
        number = next(str(n) for n in iter(lambda: chance.randrange(10_000, 100_000), None) if str(n) not in prose())
        facts.append(number)
        depth = text.index("\n", int(size * (index + 0.5) / num_facts))  # the line's end
        parts += [text[last:depth], f"\n\nFinding of the survey: {subject} has {number} {unit}.\n"]
        last = depth
    return Report(f"survey-{seed}.txt", "".join([*parts, text[last:]]), tuple(facts))


@cache
def prose() -> str:
    return "\n\n".join(text for _, text in sorted(topics.topics.items()))


def ask(client: Client, report: Report, *, fidelity: str, length: str) -> dict[str, Any]:
    """Upload, wait, summarise. Raises RuntimeError where the server refuses."""
    uploaded = client.http.post(
        "/v1/files",
        files={"file": (report.name, report.text.encode())},
        data={"purpose": "user_data", "fidelity": fidelity},
    )
    if uploaded.status_code != 200:
        raise RuntimeError(f"{report.name} was refused: {uploaded.text}")
    file_id = str(uploaded.json()["id"])
    document, code = client.wait(file_id)
    if code != "ok":
        raise RuntimeError(f"{report.name} was not read: {code}")
    answer = client.http.post(f"/v1/documents/{file_id}/summary", json={"length": length, "focus": FOCUS, "quotes": 2})
    if answer.status_code != 200:
        raise RuntimeError(f"no summary of {report.name}: {answer.text}")
    made: dict[str, Any] = answer.json()
    client.delete(file_id)
    return made | {"num_tokens": document["num_tokens"], "density": document["density"]}


def main() -> int:
    parser = argparse.ArgumentParser(prog=COMMAND)
    parser.add_argument("--documents", type=int, default=4, help="of each length")
    parser.add_argument("--tokens", type=int, nargs="+", default=[3000, 12_000])
    parser.add_argument("--facts", type=int, default=6)
    parser.add_argument("--length", choices=("short", "medium", "long"), default="long")
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args()
    seeds = range(wanted.seed, wanted.seed + wanted.documents)
    reports = [(tokens, make_report(tokens, wanted.facts, seed)) for tokens in wanted.tokens for seed in seeds]
    made = []
    with tempfile.TemporaryDirectory(prefix="foreword-summaries-") as folder, LocalServer(Path(folder)) as server:
        client = Client(server.url)
        for tokens, report in reports:
            for fidelity in ("default", "exact"):
                summary = ask(client, report, fidelity=fidelity, length=wanted.length)
                share = report.recovered(summary["summary"]) / len(report.facts)
                made.append(summary | {"tokens": tokens, "fidelity": fidelity, "share": share})
                print(
                    f"{tokens} tokens, {report.name}, {fidelity}: {share:.2f} of {len(report.facts)} facts", flush=True
                )
                print(f"    {summary['summary'][:300]!r}", flush=True)
        client.close()

    def shares(fidelity: str, *lengths: int) -> list[float]:
        return [one["share"] for one in made if one["fidelity"] == fidelity and one["tokens"] in lengths]

    sparse = [one for one in made if one["fidelity"] == "default"]
    write_entry(
        "summary_facts_recovered_share",
        statistics.mean(shares("default", *wanted.tokens)),
        "share",
        better="higher",
        samples=shares("default", *wanted.tokens),
        command=f"{COMMAND} {' '.join(sys.argv[1:])}".strip(),
        dense_share=statistics.mean(shares("exact", *wanted.tokens)),
        by_tokens={
            str(tokens): {
                "default": statistics.mean(shares("default", tokens)),
                "exact": statistics.mean(shares("exact", tokens)),
            }
            for tokens in wanted.tokens
        },
        density=[one["density"] for one in sparse],
        facts_per_document=wanted.facts,
        length=wanted.length,
        quotes_verified=sum(len(one["quotes"]) for one in sparse),
        quotes_dropped=sum(one["quotes_dropped"] for one in sparse),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
