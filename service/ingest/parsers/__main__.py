"""The parser process: requests on stdin, messages on stdout, until stdin closes.

usage: python -m service.ingest.parsers READ WRITE: the folder of its documents, and the one for what it takes out of
them
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

from service.ingest import sandbox
from service.ingest.base import MIB
from service.ingest.parsers.protocol import Message, ParseError, Request

# format → module with `parse(request)`; loaded when first needed.
PARSERS = {
    "pdf": "pdf",
    "docx": "docx",
    "xlsx": "xlsx",
    "pptx": "pptx",
    "odf": "odf",
    "epub": "epub",
    "rtf": "rtf",
    "ole": "ole",
    "html": "html",
    "image": "image",
    "mail": "mail",
    "embedded": "embedded",
}
MEMORY_BYTES = 1024 * MIB
CPU_S = 3600.0
FILE_BYTES = 2048 * MIB


def main() -> None:
    out = os.fdopen(os.dup(1), "wb", buffering=1 << 16)
    os.dup2(2, 1)  # a library that prints must not break the protocol
    sys.setrecursionlimit(3000)
    sandbox.apply(
        memory_bytes=MEMORY_BYTES,
        cpu_s=CPU_S,
        file_bytes=FILE_BYTES,
        may_execute=False,
        read=[Path(sys.argv[1])],
        write=[Path(sys.argv[2])],
    )
    for line in sys.stdin.buffer:
        for message in _answer(json.loads(line)):
            out.write(json.dumps(message).encode() + b"\n")
        out.flush()


def _answer(fields: Message) -> Iterator[Message]:
    request = Request(**{**fields, "file": Path(fields["file"]), "scratch": Path(fields["scratch"])})
    try:
        parse: Callable[[Request], Iterator[Message]] = import_module(
            f"service.ingest.parsers.{PARSERS[request.format]}"
        ).parse
        yield from parse(request)
    except ParseError as error:
        yield {"error": {"code": error.code, "message": str(error)}}
    except MemoryError:
        yield {
            "error": {
                "code": "document_too_large",
                "message": f"parsing needs more than {MEMORY_BYTES} bytes of memory",
            }
        }
    except Exception as error:
        # The last resort of a process whose whole purpose is to fail alone: whatever a library raised on hostile bytes.
        yield {"error": {"code": "document_corrupt", "message": f"{type(error).__name__}: {error}"[:300]}}
    else:
        yield {"end": True}


if __name__ == "__main__":
    main()
