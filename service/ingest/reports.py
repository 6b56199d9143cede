"""What the reading process says for the log: that it began, and where it crashed. Never what it read.

Hostile bytes may have taken it over, so the parent believes nothing: it logs fixed sentences, and of the values only
those that look as they should.
"""

import logging
import re
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

MOST_FRAMES = 20
_PLACE = re.compile(r"[A-Za-z0-9_.]{1,80}:[0-9]{1,6}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,60}")


def began(request: Mapping[str, Any]) -> dict[str, Any]:
    return {"began": {"request_id": request["request_id"], "sources": len(request["sources"])}}


def crashed(request: Mapping[str, Any], error: BaseException) -> dict[str, Any]:
    """Kind and places of what went wrong, innermost first."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    places = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames][:MOST_FRAMES]
    return {"crashed": {"request_id": request["request_id"], "kind": type(error).__name__, "places": places}}


def log_report(message: Mapping[str, Any], pid: int, request_id: str | None) -> None:
    """One message of the process `pid`, which works for the request `request_id`."""
    told = message.get("began") or message.get("crashed")
    if not isinstance(told, dict) or told.get("request_id") != request_id:
        log.warning("the reading process %d says what it can't mean", pid)
    elif "began" in message:
        number = told.get("sources")
        log.info("process %d reads %d sources", pid, number if isinstance(number, int) else 0)
    else:
        kind, places = str(told.get("kind")), told.get("places")
        known = [str(place) for place in places if _PLACE.fullmatch(str(place))] if isinstance(places, list) else []
        shown = kind if _NAME.fullmatch(kind) else "an error"
        where = " < ".join(known[:MOST_FRAMES]) or "nowhere known"
        log.warning("the reading process %d failed with %s at %s", pid, shown, where)
