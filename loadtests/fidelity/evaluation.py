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
from loadtests.fidelity.variants import SALT, Engines, Variant
from loadtests.results import commit, cpu_name, versions
from service.prompt import Message, PromptFormat

# Kept of the length asked for: the question's own tokens and the reply's.
QUESTION_ROOM = 256
_KEPT_REPLIES = 3
_HOLDER, _IN_PROMPT = "document", "question-in-prompt"


class Evaluation:
    """`in_prompt_questions`: how many of a document's questions are also asked with the question in the prompt."""

    def __init__(
        self, engines: Engines, prompts: PromptFormat, *, in_prompt_questions: int = 1, command: str = ""
    ) -> None:
        self._engines, self._prompts = engines, prompts
        self._in_prompt, self._command = in_prompt_questions, command
        self._versions, self._commit = versions(), commit()

    def document_tokens(self, length: int) -> int:
        """What is left of `length` tokens for the document's text."""
        return length - self._prompts.prefix_length([0]) - QUESTION_ROOM

    def device(self, variant: Variant) -> str:
        return torch.cuda.get_device_name() if self._engines.of(variant).device == "cuda" else cpu_name()

    def key(self, variant: Variant, *, task: str, length: int, questions: int, index: int) -> Key:
        digest = self._engines.of(variant).digest(variant.fidelity)
        return Key(self.device(variant), digest, task, length, questions, index)

    def measure(self, document: TaskDocument, key: Key, variant: Variant) -> Record:
        """Raises what the engine raises; the document's KV is removed in any case."""
        prefix = self._prompts.document_prefix([self._prompts.tokenizer.encode(document.text)])
        try:
            result = self._engines.prefill(variant, prefix, holder=_HOLDER)
            started = time.perf_counter()
            replies, nlls = self._ask(variant, prefix, document, document.questions)
            answer_s = time.perf_counter() - started
            in_prompt = document.questions[: self._in_prompt] if variant.name == "default" else ()
            in_prompt_scores = [self._ask_in_prompt(variant, prefix, document, question) for question in in_prompt]
        finally:
            self._engines.release(_HOLDER)
        return Record(
            key=key,
            variant=variant.name,
            num_tokens=result.num_tokens,
            scores=_scores(document.questions, replies),
            nlls=nlls,
            replies=replies[:_KEPT_REPLIES],
            density=result.density,
            recall=None if result.recall is None else asdict(result.recall),
            heads=dict(result.heads),
            prefill_s=result.seconds,
            answer_s=answer_s,
            in_prompt_scores=in_prompt_scores,
            command=self._command,
            versions=self._versions,
            commit=self._commit,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def _ask(
        self, variant: Variant, prefix: TokenIds, document: TaskDocument, questions: Sequence[Question]
    ) -> tuple[list[str], list[float]]:
        """Greedy replies and the true replies' NLL, all questions from one reading of the stored KV."""
        return self._read(
            variant, prefix, document, questions, [self._question_ids(question) for question in questions]
        )

    def _ask_in_prompt(self, variant: Variant, prefix: TokenIds, document: TaskDocument, question: Question) -> float:
        """The score with the question prefilled behind the document, whose full segments come from the store."""
        prompt = np.concatenate([prefix, self._question_ids(question)])
        try:
            self._engines.prefill(variant, prompt[:-1], holder=_IN_PROMPT)
            replies, _ = self._read(variant, prompt[:-1], document, [question], [prompt[-1:]])
        finally:
            self._engines.release(_IN_PROMPT)
        return question.score(replies[0])

    def _read(
        self,
        variant: Variant,
        prefix: TokenIds,
        document: TaskDocument,
        questions: Sequence[Question],
        rows: Sequence[TokenIds],
    ) -> tuple[list[str], list[float]]:
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

    def _question_ids(self, question: Question) -> TokenIds:
        asked = self._prompts.question([Message("user", question.text)], with_documents=True)
        return np.concatenate([asked, self._prompts.tokenizer.encode(question.answer_prefix)])


def _scores(questions: Sequence[Question], replies: Sequence[str]) -> list[float]:
    return [question.score(reply) for question, reply in zip(questions, replies, strict=True)]
