"""Every evaluation document by the name of its task."""

from dataclasses import dataclass, field
from pathlib import Path

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


@dataclass
class DocumentMaker:
    """`contracts` is the folder of the contract tasks; None: they can't be made."""

    count_tokens: CountTokens
    contracts: Path | None = None
    _filler: Filler | None = None
    _files: dict[str, list[tuple[str, str]]] = field(default_factory=dict)

    def load(self) -> None:
        """Read all texts now rather than with the first document. Raises FileNotFoundError."""
        self._filler = load_filler("eval")
        self._files = {"repository": load_repository()}
        if self.contracts is not None:
            self._files["contracts"] = load_contracts(self.contracts)

    def make(self, task: str, *, num_tokens: int, index: int, num_questions: int) -> TaskDocument:
        """The document number `index` of a task, at most `num_tokens` long. Raises ValueError."""
        if self._filler is None:
            self.load()
            assert self._filler is not None
        seed = _FIRST_SEED + index
        size, count, questions = num_tokens, self.count_tokens, num_questions
        if task in RULER_TASKS:
            return make_document(
                task, num_tokens=size, seed=seed, count_tokens=count, filler=self._filler, num_questions=questions
            )
        if task == "needle_map":
            return needle_map(
                num_tokens=size, seed=seed, count_tokens=count, filler=self._filler, num_questions=questions
            )
        if task == "key_values":
            return key_values(num_tokens=size, seed=seed, count_tokens=count, num_questions=questions)
        files = self._files.get("repository" if task in REPOSITORY_TASKS else "contracts")
        if files is None:
            raise ValueError(f"{task} needs a folder of contracts")
        return make_source_document(
            task, files, num_tokens=size, seed=seed, count_tokens=count, num_questions=questions
        )


def true_reply(document: TaskDocument, question: Question) -> str:
    """What a right reply goes on with behind the question's answer prefix: the text whose likelihood is measured."""
    answers = ", ".join(in_reading_order(document, question.answers)) + "."
    return f" {answers}" if question.answer_prefix else answers
