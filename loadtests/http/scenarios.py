"""What users do in each scenario, as locust users."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import gevent
import gevent.pool
from locust import User, constant, task
from locust.env import Environment
from locust.exception import StopUser

from loadtests.http.arrivals import poisson
from loadtests.http.client import Client, Leave, Reply
from loadtests.http.samples import Sample
from loadtests.http.texts import Text, Texts

SAMPLES: list[Sample] = []
LONG_ANSWER = 400  # of those who leave: whoever goes on with it is seen in the queue for long
FLOOD = 6  # arrivals of the first tenant for each of another


@dataclass(frozen=True)
class Document:
    file_id: str
    text: Text
    num_tokens: int


class Scenario(User):
    """Settings, clients by tenant, and how requests are recorded."""

    abstract = True
    wait_time = constant(0)

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.options = environment.parsed_options
        self.texts = Texts(self.options.seed)
        keys = [tuple(pair.split("=", 1)) for pair in self.options.key] or [("local", "")]
        self.clients = {tenant: Client(self.host, key or None) for tenant, key in keys}
        self.tenants = list(self.clients)

    def record(
        self,
        step: str,
        tenant: str,
        due_at: float,
        reply: Reply,
        *,
        num_tokens: int = 0,
        right: bool | None = None,
        late_s: float = 0.0,
    ) -> None:
        sample = Sample(
            scenario=type(self).__name__,
            step=step,
            tenant=tenant,
            arrived_at=due_at,
            ended_at=time.monotonic(),
            code=reply.code,
            num_tokens=num_tokens,
            ttft_s=reply.ttft_s,
            cache_state=reply.cache_state,
            server_ttft_s=reply.server_ttft_s,
            right=right,
            late_s=late_s,
        )
        SAMPLES.append(sample)
        self.environment.events.request.fire(
            request_type="whole" if reply.ttft_s is None else "TTFT",
            name=f"{step} {reply.cache_state or reply.code}",
            response_time=1000 * (reply.seconds if reply.ttft_s is None else reply.ttft_s),
            response_length=0,
            exception=None if reply.code in ("ok", "left") else RuntimeError(reply.code),
            context={},
        )

    def ask(self, tenant: str, document: Document, due_at: float, chance: Random, step: str = "ask") -> Reply:
        """A question whose answer is read to its end; TTFT counts from `due_at`."""
        late_s = time.monotonic() - due_at
        question = chance.choice(sorted(document.text.numbers))
        reply = self.clients[tenant].ask(
            document.file_id, question, max_tokens=self.options.max_tokens, arrived_at=due_at
        )
        right = document.text.numbers[question] in reply.text if reply.code == "ok" else None
        self.record(step, tenant, due_at, reply, num_tokens=document.num_tokens, right=right, late_s=late_s)
        return reply

    def upload(self, tenant: str, num_tokens: int) -> Document | None:
        """A new text; None where it was refused, which is recorded."""
        text, began_at = self.texts.draw(num_tokens), time.monotonic()
        file_id, code = self.clients[tenant].upload(text)
        if not file_id:
            self.record("upload", tenant, began_at, Reply(code, time.monotonic() - began_at))
            return None
        return Document(file_id, text, num_tokens)

    def prepare(self, tenant: str) -> list[Document]:
        """A document of each length, read. Raises RuntimeError where one can't be."""
        found = []
        for num_tokens in self.options.tokens:
            document = self.upload(tenant, num_tokens)
            record, code = self.clients[tenant].wait(document.file_id) if document else ({}, "refused")
            if document is None or code != "ok":
                raise RuntimeError(f"a document of {num_tokens} tokens was not read: {code}")
            found.append(Document(document.file_id, document.text, int(record["num_tokens"])))
        return found


class OpenLoop(Scenario):
    """`arrive` is called, in a greenlet of its own, at each due time; then locust is told to end.

    Each arrival draws from numbers of its own: what it does doesn't depend on how fast others were answered.
    """

    abstract = True
    fixed_count = 1

    @task
    def run_schedule(self) -> None:
        self.begin()
        group, started = gevent.pool.Group(), time.monotonic()
        for number, due in enumerate(self.schedule()):
            gevent.sleep(max(0.0, started + due - time.monotonic()))
            group.spawn(self.arrive, started + due, Random(f"{self.options.seed}:{number}"))
        group.join()
        self.environment.runner.quit()

    def schedule(self) -> Iterator[float]:
        return poisson(self.options.rate, self.options.seconds, seed=self.options.seed)

    def begin(self) -> None:
        """What must be there before the first arrival."""

    def arrive(self, due_at: float, chance: Random) -> None:
        raise NotImplementedError


class ColdUploads(OpenLoop):
    """Each arrival uploads a new document and asks at once; TTFT counts from the end of its upload."""

    def arrive(self, due_at: float, chance: Random) -> None:
        tenant = self.tenants[0]
        document = self.upload(tenant, chance.choice(self.options.tokens))
        if document is not None:
            self.ask(tenant, document, time.monotonic(), chance)


class WarmQuestions(OpenLoop):
    """Each arrival asks about one of a few documents that were read before."""

    def begin(self) -> None:
        self.documents = self.prepare(self.tenants[0])

    def arrive(self, due_at: float, chance: Random) -> None:
        self.ask(self.tenants[0], chance.choice(self.documents), due_at, chance)


class WarmUsers(Scenario):
    """Closed-loop: each user asks again as soon as it is answered, so as many questions are open as there are users.

    All begin when all are there and the documents are read.
    """

    _documents: list[Document] | None = None
    _ends_at = 0.0
    _asking = 0

    def on_start(self) -> None:
        cls = type(self)
        cls._asking += 1
        self.chance = Random(f"{self.options.seed}:{cls._asking}")  # each user draws for itself
        if cls._documents is None:
            cls._documents = []
            documents = self.prepare(self.tenants[0])
            cls._ends_at = time.monotonic() + self.options.seconds
            cls._documents = documents
        while not cls._documents:
            gevent.sleep(0.05)

    @task
    def question(self) -> None:
        cls = type(self)
        assert cls._documents
        if time.monotonic() < cls._ends_at:
            document = self.chance.choice(cls._documents)
            self.ask(self.tenants[0], document, time.monotonic(), self.chance)
            return
        cls._asking -= 1
        if not cls._asking:  # the slowest answers count too
            self.environment.runner.quit()
        raise StopUser


class MixedTenants(OpenLoop):
    """The first tenant sends FLOOD times as much as each other one; everybody tries to see what isn't theirs."""

    def begin(self) -> None:
        self.documents = {tenant: self.prepare(tenant) for tenant in self.tenants}

    def arrive(self, due_at: float, chance: Random) -> None:
        tenant = chance.choices(self.tenants, [FLOOD, *[1] * (len(self.tenants) - 1)])[0]
        draw = chance.random()
        if draw < 0.2:
            document = self.upload(tenant, min(self.options.tokens))
            if document is not None:
                self.ask(tenant, document, time.monotonic(), chance, "ask new")
        elif draw < 0.3 and len(self.tenants) > 1:
            self.trespass(tenant, due_at, chance)
        else:
            self.ask(tenant, chance.choice(self.documents[tenant]), due_at, chance)

    def trespass(self, tenant: str, due_at: float, chance: Random) -> None:
        """Asking about another tenant's document must end as if there were none."""
        other = chance.choice([name for name in self.tenants if name != tenant])
        document = chance.choice(self.documents[other])
        question = next(iter(document.text.numbers))
        reply = self.clients[tenant].ask(document.file_id, question, max_tokens=1, arrived_at=due_at)
        code = {"file_not_found": "ok", "ok": "trespassed"}.get(reply.code, reply.code)
        self.record("trespass", tenant, due_at, Reply(code, reply.seconds))


class DisconnectStorm(OpenLoop):
    """Clients leave behind the first text, or while their document is read; some withdraw it, some stay."""

    def begin(self) -> None:
        self.documents = self.prepare(self.tenants[0])

    def arrive(self, due_at: float, chance: Random) -> None:
        tenant = self.tenants[0]
        match chance.choices(("stream", "prefill", "withdraw", "stay"), (5, 2, 1, 2))[0]:
            case "stay":
                self.ask(tenant, chance.choice(self.documents), due_at, chance)
            case "stream":
                self._leave(tenant, chance.choice(self.documents), due_at, "stream")
            case "prefill":
                # The document isn't withdrawn: its prefill must be finished, and later it answers warm.
                document = self.upload(tenant, chance.choice(self.options.tokens))
                if document is not None:
                    self._leave(tenant, document, due_at, "prefill")
            case _:
                self._withdraw(tenant, due_at, chance)

    def _leave(self, tenant: str, document: Document, due_at: float, leave: Leave) -> None:
        question = next(iter(document.text.numbers))
        reply = self.clients[tenant].ask(
            document.file_id, question, max_tokens=LONG_ANSWER, leave=leave, arrived_at=due_at
        )
        self.record(f"leave {leave}", tenant, due_at, reply, num_tokens=document.num_tokens)

    def _withdraw(self, tenant: str, due_at: float, chance: Random) -> None:
        document = self.upload(tenant, max(self.options.tokens))
        if document is not None:
            gevent.sleep(chance.random())
            code = self.clients[tenant].delete(document.file_id)
            self.record("withdraw", tenant, due_at, Reply(code, time.monotonic() - due_at))
