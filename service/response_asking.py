"""Asking a response's question: now, or as soon as its documents are read; and ending its answer."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from anyio import to_thread

from service.answers import Question, put_question
from service.background import Held
from service.dependencies import Services
from service.errors import InternalError, translate
from service.objects.base import ObjectChanged, StoredObject, UnknownObject
from service.queue.base import UnknownJob
from service.response_records import KEPT_S, fail, question_of, read_chat
from service.waiting import ReadyFile, Stage, wait_for_documents

FIRST_LOOK_S = 0.5  # until somebody looks whether the answer has ended


async def ask_when_ready(services: Services, held: Held) -> AsyncGenerator[Stage, None]:
    """Wait for the documents, then put the question; what goes wrong is the response's failure.

    Raises ObjectChanged.
    """
    try:
        files: list[ReadyFile] = []
        documents = wait_for_documents(services, held.stored.tenant, held.data["files"])
        async with aclosing(documents):
            async for step in documents:
                held.check()
                if isinstance(step, Stage):
                    yield step
                else:
                    files = step
        chat = await to_thread.run_sync(read_chat, services, held.stored)
        question = await to_thread.run_sync(question_of, services, chat, files)
        background = held.data["request"]["background"]
        now = time.time()
        await held.save({"status": "asked", "asked_at": now}, due_at=now + (FIRST_LOOK_S if background else KEPT_S))
        await to_thread.run_sync(partial(put, services, held.stored, question, waited=True))
    except ObjectChanged:
        raise
    except Exception as error:
        known = translate(error)
        await fail(held, known or InternalError("The server failed on this response."))
        if known is None:
            raise


def put(services: Services, stored: StoredObject, question: Question, *, waited: bool) -> None:
    """The answer's job; ended again at once if the response was, between its last change and this."""
    put_question(
        services,
        stored.tenant,
        question,
        received_at=stored.data["received_at"],
        waited=waited,
        origin=stored.data["origin"],
        job_id=stored.data["job_id"],
        reader=None if stored.data["request"]["background"] else services.reader,
    )
    try:
        now = services.objects.get("response", stored.tenant, stored.id).data["status"]
    except UnknownObject:
        now = "deleted"
    if now != "asked":
        end_job(services, stored)


def end_job(services: Services, stored: StoredObject) -> None:
    try:
        services.queue.cancel(stored.data["job_id"])
    except UnknownJob:
        return
