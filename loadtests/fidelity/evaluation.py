"""One document under one variant: prefilled once, then asked everything from its stored KV."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime

import numpy as np
import torch

from engine.chain import TokenIds
from loadtests.fidelity.documents import true_reply
from loadtests.fidelity.reading import Reading
from loadtests.fidelity.records import Key, Record
from loadtests.fidelity.tasks import Question, TaskDocument
from loadtests.fidelity.variants import LATE, SALT, Engines, Variant
from loadtests.results import commit, cpu_name, versions
from service.prompt import Message, PromptFormat

# Kept of the length asked for: the question's own tokens and the reply's.
QUESTION_ROOM = 256
_KEPT_REPLIES = 3
_HOLDER, _IN_PROMPT = "document", "question-in-prompt"


class Evaluation:
    """`late_questions`: how many of a document's questions variant `late` asks."""

    def __init__(self, engines: Engines, prompts: PromptFormat, *, late_questions: int = 2, command: str = "") -> None:
        self._engines, self._prompts = engines, prompts
        self._late_questions, self._command = late_questions, command
        self._versions, self._commit = versions(), commit()

    def document_tokens(self, length: int) -> int:
        """What is left of `length` tokens for the document's text."""
        return length - self._prompts.prefix_length([0]) - QUESTION_ROOM

    def device(self, variant: Variant) -> str:
        return torch.cuda.get_device_name() if self._engines.of(variant).device == "cuda" else cpu_name()

    def key(self, variant: Variant, *, task: str, length: int, questions: int, index: int) -> Key:
        digest = self._engines.of(variant).digest(variant.fidelity)
        late = self._late_questions if variant.name == LATE else 0
        return Key(self.device(variant), digest, task, length, questions, index, late)

    def measure(self, document: TaskDocument, key: Key, variant: Variant) -> Record:
        """Raises what the engine raises; the document's KV is removed in any case."""
        prefix = self._prompts.document_prefix([self._prompts.tokenizer.encode(document.text)])
        questions = document.questions[: key.late] if key.late else document.questions
        late: dict[str, list[float]] = {}
        try:
            result = self._engines.prefill(variant, prefix, holder=_HOLDER)
            started = time.perf_counter()
            asked = [self._asked(document, question) for question in questions]
            replies, nlls = self._read(variant, prefix, document, questions, asked)
            answer_s = time.perf_counter() - started
            if key.late:
                late = self._ask_at_other_times(variant, prefix, document, questions)
        finally:
            self._engines.release(_HOLDER)
        return Record(
            key=key,
            variant=variant.name,
            num_tokens=result.num_tokens,
            scores=_scores(questions, replies),
            nlls=nlls,
            replies=replies[:_KEPT_REPLIES],
            density=result.density,
            recall=None if result.recall is None else asdict(result.recall),
            heads=dict(result.heads),
            prefill_s=result.seconds,
            answer_s=answer_s,
            command=self._command,
            versions=self._versions,
            commit=self._commit,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            **late,
        )

    def _ask_at_other_times(
        self, variant: Variant, prefix: TokenIds, document: TaskDocument, questions: Sequence[Question]
    ) -> dict[str, list[float]]:
        """Scores and NLLs in the prompt; and as second questions, later and in the prompt. Fields of a Record."""
        first = [self._asked(document, question) for question in questions]
        scores, nlls = self._ask_in_prompt(variant, prefix, document, questions, first)
        found = {"in_prompt_scores": scores, "in_prompt_nlls": nlls}
        pairs = [(question, other) for question in questions if (other := _another(document, question)) is not None]
        if pairs:
            behind = [question for question, _ in pairs]
            second = [self._asked(document, question, behind=other) for question, other in pairs]
            replies, nlls = self._read(variant, prefix, document, behind, second)
            found |= {"second_scores": _scores(behind, replies), "second_nlls": nlls}
            scores, nlls = self._ask_in_prompt(variant, prefix, document, behind, second)
            found |= {"second_in_prompt_scores": scores, "second_in_prompt_nlls": nlls}
        return found

    def _ask_in_prompt(
        self,
        variant: Variant,
        prefix: TokenIds,
        document: TaskDocument,
        questions: Sequence[Question],
        asked: Sequence[TokenIds],
    ) -> tuple[list[float], list[float]]:
        """(scores, NLLs) with `asked` prefilled behind the document, whose full segments come from the store."""
        scores, nlls = [], []
        for question, ids in zip(questions, asked, strict=True):
            prompt = np.concatenate([prefix, ids])
            try:
                self._engines.prefill(variant, prompt[:-1], holder=_IN_PROMPT)
                replies, losses = self._read(variant, prompt[:-1], document, [question], [prompt[-1:]])
            finally:
                self._engines.release(_IN_PROMPT)
            scores.append(question.score(replies[0]))
            nlls += losses
        return scores, nlls

    def _read(
        self,
        variant: Variant,
        prefix: TokenIds,
        document: TaskDocument,
        questions: Sequence[Question],
        rows: Sequence[TokenIds],
    ) -> tuple[list[str], list[float]]:
        """Greedy replies and the true replies' NLL, all questions from one reading of the stored KV."""
        tokenizer = self._prompts.tokenizer
        with Reading.open(self._engines.of(variant), prefix, salt=SALT, fidelity=variant.fidelity) as reading:
            tokens, nlls = reading.ask(
                rows,
                replies=[tokenizer.encode(true_reply(document, question)) for question in questions],
                max_new_tokens=[question.max_new_tokens for question in questions],
                # What follows can't change the score.
                enough=lambda index, ids: questions[index].score(tokenizer.decode(ids)) == 1.0,
            )
        return [tokenizer.decode(ids) for ids in tokens], nlls

    def _asked(self, document: TaskDocument, question: Question, *, behind: Question | None = None) -> TokenIds:
        """What follows the document's prefix up to the reply; `behind` another question, it and its true reply too."""
        turns = [Message("user", question.text)]
        if behind is not None:
            reply = Message("assistant", behind.answer_prefix + true_reply(document, behind))
            turns = [Message("user", behind.text), reply, *turns]
        asked = self._prompts.question(turns, with_documents=True)
        return np.concatenate([asked, self._prompts.tokenizer.encode(question.answer_prefix)])


def _another(document: TaskDocument, question: Question) -> Question | None:
    """A question of the document whose reply doesn't give this one's away; the next such one, if there is any."""
    at = document.questions.index(question)
    others = (*document.questions[at + 1 :], *document.questions[:at])
    return next((other for other in others if not set(other.answers) & set(question.answers)), None)


def _scores(questions: Sequence[Question], replies: Sequence[str]) -> list[float]:
    return [question.score(reply) for question, reply in zip(questions, replies, strict=True)]
