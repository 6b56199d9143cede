"""The scenarios for locust; `python -m loadtests.http` runs them in turn, and locust alone runs any of them:

    locust -f loadtests/http/locustfile.py WarmQuestions --headless -u 1 --host http://127.0.0.1:8000 --rate 2

Arrivals are open-loop: one locust user starts a greenlet whenever one is due. WarmUsers alone is closed-loop.
"""

from pathlib import Path
from typing import Any

from locust import events
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment

from loadtests.http.samples import write_samples
from loadtests.http.scenarios import SAMPLES, ColdUploads, DisconnectStorm, MixedTenants, WarmQuestions, WarmUsers

__all__ = ["ColdUploads", "DisconnectStorm", "MixedTenants", "WarmQuestions", "WarmUsers"]


@events.init_command_line_parser.add_listener
def add_options(parser: LocustArgumentParser) -> None:
    parser.add_argument("--rate", type=float, default=1.0, help="arrivals a second")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long they come, or users ask")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000, 2000, 4000], help="lengths of documents")
    parser.add_argument("--max-tokens", type=int, default=16, help="of an answer")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--key", action="append", default=[], help="TENANT=KEY; MixedTenants takes several")
    parser.add_argument("--samples", type=Path, help="where one line a request goes")


@events.quitting.add_listener
def save(environment: Environment, **_: Any) -> None:
    if environment.parsed_options is not None and environment.parsed_options.samples is not None:
        write_samples(environment.parsed_options.samples, SAMPLES)
