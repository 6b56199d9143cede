"""Word 97 files through LibreOffice, where it is installed: with the numbers, notes and changes that our own reader
leaves out.

LibreOffice's library is used, not its program: without a window, a socket or a second process. It runs in
service.ingest.office_process, in a session of its own that is killed whole.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from functools import cached_property
from pathlib import Path

from service.ingest.environment import child_environment

TIMEOUT_S = 120.0
PROGRAMS = ("soffice", "libreoffice")
LIBRARIES = ("libsofficeapp.so", "libmergedlo.so")  # either, as LibreOffice was built, has the entry point
# No macros, nothing fetched for links, no updates of them; whatever the document wishes.
SETTINGS = (
    '<?xml version="1.0" encoding="UTF-8"?><oor:items xmlns:oor="http://openoffice.org/2001/registry">{}</oor:items>'
)
SETTING = '<item oor:path="/org.openoffice.Office.{}"><prop oor:name="{}" oor:op="fuse"><value>{}</value></prop></item>'
WISHES = (
    ("Common/Security/Scripting", "DisableMacrosExecution", "true"),
    ("Common/Security/Scripting", "MacroSecurityLevel", "3"),
    ("Common/Security/Scripting", "BlockUntrustedRefererLinks", "true"),
    ("Writer/Content/Update", "Link", "0"),
)


class Office:
    """Converts one document at a time to DOCX; safe to use from several threads."""

    def __init__(self, library: Path) -> None:
        self.library = library

    @classmethod
    def find(cls) -> "Office | None":
        """The LibreOffice on the path, if its library lies beside it."""
        for program in PROGRAMS:
            folder = Path(shutil.which(program) or "/nowhere/program").resolve().parent
            for name in LIBRARIES:
                if (folder / name).is_file():
                    return cls(folder / name)
        return None

    @cached_property
    def version(self) -> str:
        """Product and build, as LibreOffice's own files have them."""
        told = []
        for name, key in (("bootstraprc", "ProductKey="), ("versionrc", "buildid=")):
            with contextlib.suppress(OSError):
                lines = (self.library.parent / name).read_text("utf-8", "replace").splitlines()
                told += [line.removeprefix(key) for line in lines if line.startswith(key)]
        return " ".join(told) or "LibreOffice"

    def to_docx(self, document: Path, out: Path) -> bool:
        """Write `document`, a Word file, as DOCX to `out`. False if LibreOffice fails, crashes or takes too long."""
        with tempfile.TemporaryDirectory(dir=out.parent, prefix="office-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            shutil.copyfile(document, folder / "input.doc")
            user = folder / "profile" / "user"
            user.mkdir(parents=True)
            (user / "registrymodifications.xcu").write_text(
                SETTINGS.format("".join(SETTING.format(*w) for w in WISHES))
            )
            made = folder / "output.docx"
            if not _run(self.library, folder) or not made.is_file() or made.is_symlink():
                return False
            os.replace(made, out)
            return True


def _run(library: Path, folder: Path) -> bool:
    """Whether the process came to a good end within TIMEOUT_S."""
    process = subprocess.Popen(
        [sys.executable, "-s", "-m", "service.ingest.office_process", str(library), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env={**child_environment(folder), "SAL_USE_VCLPLUGIN": "svp"},
        start_new_session=True,
    )
    assert process.stdin is not None
    try:
        return process.wait(TIMEOUT_S) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdin.close()
