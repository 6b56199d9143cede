"""The process that LibreOffice runs in, under the limits of a parser: no network, no programs, one folder.

usage: python -m service.ingest.office_process LIBRARY FOLDER

Reads FOLDER/input.doc and writes FOLDER/output.docx. Exit status 0: done; 1: not done. Ends when its stdin closes.
"""

import contextlib
import ctypes
import os
import sys
import threading
from pathlib import Path
from typing import Any

from service.ingest import landlock, sandbox
from service.ingest.base import MIB
from service.ingest.office import TIMEOUT_S

MEMORY_BYTES = 2048 * MIB
FILE_BYTES = 512 * MIB
# Places in the tables of functions that LibreOfficeKit.h declares: appended to since version 4.3, never changed.
DOCUMENT_LOAD, SAVE_AS = 2, 2


class _Object(ctypes.Structure):
    """LibreOfficeKit and LibreOfficeKitDocument alike: a pointer to the table of its functions."""

    _fields_ = (("table", ctypes.POINTER(ctypes.c_void_p)),)


def main() -> int:
    library, folder = map(Path, sys.argv[1:])
    sandbox.apply(
        memory_bytes=MEMORY_BYTES,
        cpu_s=TIMEOUT_S,
        file_bytes=FILE_BYTES,
        may_execute=False,
        read=landlock.programs([str(library)]),
        write=[folder],
    )
    threading.Thread(target=_end_with_parent, daemon=True).start()
    return 0 if convert(library, folder) else 1


def convert(library: Path, folder: Path) -> bool:
    start = ctypes.CDLL(str(library)).libreofficekit_hook_2
    start.restype, start.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_char_p)
    kit = start(os.fsencode(library.parent), _url(folder / "profile"))
    if not kit:
        return False
    document = _function(kit, DOCUMENT_LOAD, ctypes.c_void_p, 1)(kit, _url(folder / "input.doc"))
    if not document:
        return False
    save = _function(document, SAVE_AS, ctypes.c_int, 3)
    return bool(save(document, _url(folder / "output.docx"), b"docx", b""))


def _function(instance: int, place: int, result: Any, num_strings: int) -> Any:
    table = ctypes.cast(instance, ctypes.POINTER(_Object)).contents.table
    return ctypes.CFUNCTYPE(result, ctypes.c_void_p, *[ctypes.c_char_p] * num_strings)(table[place])


def _url(path: Path) -> bytes:
    return path.absolute().as_uri().encode()


def _end_with_parent() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 1):
            pass
    os._exit(1)


if __name__ == "__main__":
    # LibreOffice's own threads and exit handlers have nothing left to do.
    os._exit(main())
