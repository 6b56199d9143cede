"""Every evaluation document by the name of its task."""

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from loadtests.fidelity.filler import Filler, load_filler
from loadtests.fidelity.retrieval import key_values, needle_map
from loadtests.fidelity.sources import (
    CONTRACT_TASKS,
    REPOSITORY_TASKS,
    load_contracts,
    load_repository,
    make_source_document,
)
from loadtests.fidelity.tasks import TASKS as RULER_TASKS
from loadtests.fidelity.tasks import CountTokens, Question, TaskDocument, in_reading_order, make_document

GROUPS: dict[str, tuple[str, ...]] = {
    "ruler": RULER_TASKS,
    "retrieval": ("needle_map", "key_values"),
    "repository": REPOSITORY_TASKS,
    "contracts": CONTRACT_TASKS,
}
ALL_TASKS = tuple(task for tasks in GROUPS.values() for task in tasks)
# Apart from the seeds of training documents, so that nothing is measured on what a model was adapted on.
_FIRST_SEED = 2_000_003


def parse_tasks(names: str) -> list[str]:
    """Comma-separated names of tasks and groups, `all` for everything. Raises ValueError for an unknown one."""
    tasks: list[str] = []
    for name in names.split(","):
        found = ALL_TASKS if name == "all" else GROUPS.get(name, (name,))
        if not set(found) <= set(ALL_TASKS):
            raise ValueError(f"unknown task {name!r}, expected all, {', '.join(GROUPS)} or {', '.join(ALL_TASKS)}")
        tasks += [task for task in found if task not in tasks]
    return tasks


class DocumentMaker:
    """Makes any task's documents; texts are read when they are first needed.

    `contracts` is the folder of the contract tasks; None: they can't be made.
    """

    def __init__(self, count_tokens: CountTokens, contracts: Path | None = None) -> None:
        self._count_tokens, self._contracts = count_tokens, contracts

    def load(self, tasks: Iterable[str]) -> None:
        """Read now what these tasks need. Raises FileNotFoundError, ValueError where a folder is missing."""
        for task in tasks:
            if task in (*RULER_TASKS, "needle_map"):
                _ = self._filler.words
            elif task in REPOSITORY_TASKS:
                _ = self._repository
            elif task in CONTRACT_TASKS:
                _ = self._agreements

    def make(self, task: str, *, num_tokens: int, index: int, num_questions: int) -> TaskDocument:
        """The document number `index` of a task, at most `num_tokens` long. Raises ValueError."""
        how: dict[str, Any] = {
            "num_tokens": num_tokens,
            "seed": _FIRST_SEED + index,
            "count_tokens": self._count_tokens,
            "num_questions": num_questions,
        }
        if task == "needle_map":
            return needle_map(filler=self._filler, **how)
        if task == "key_values":
            return key_values(**how)
        if task in REPOSITORY_TASKS:
            return make_source_document(task, self._repository, **how)
        if task in CONTRACT_TASKS:
            return make_source_document(task, self._agreements, **how)
        return make_document(task, filler=self._filler, **how)

    @cached_property
    def _filler(self) -> Filler:
        return load_filler("eval")

    @cached_property
    def _repository(self) -> list[tuple[str, str]]:
        return load_repository()

    @cached_property
    def _agreements(self) -> list[tuple[str, str]]:
        if self._contracts is None:
            raise ValueError("the contract tasks need a folder of contracts")
        return load_contracts(self._contracts)


def true_reply(document: TaskDocument, question: Question) -> str:
    """What a right reply goes on with behind the question's answer prefix: the text whose likelihood is measured."""
    answers = ", ".join(in_reading_order(document, question.answers)) + "."
    return f" {answers}" if question.answer_prefix else answers
