"""Optional OCR of scanned pages by tesseract, where it is installed."""

import shutil
import subprocess
from functools import cached_property
from pathlib import Path

TIMEOUT_S = 120.0
LANGUAGES_WANTED = ("eng", "deu", "fra", "spa", "ita", "nld", "por")


class Ocr:
    """Runs tesseract on one page image at a time; safe to use from several threads."""

    def __init__(self, program: str) -> None:
        self.program = program

    @classmethod
    def find(cls) -> "Ocr | None":
        program = shutil.which("tesseract")
        return cls(program) if program else None

    @cached_property
    def _installed(self) -> frozenset[str]:
        return frozenset(self._say("--list-langs").split())

    @cached_property
    def languages(self) -> str:
        """Those of LANGUAGES_WANTED that are installed, as tesseract takes them; '' without any."""
        return "+".join(lang for lang in LANGUAGES_WANTED if lang in self._installed)

    @cached_property
    def _segmentation(self) -> str:
        """Whole pages; turned upright first where the data for that are installed."""
        return "1" if "osd" in self._installed else "3"

    @cached_property
    def version(self) -> str:
        return self._say("--version").split("\n", 1)[0].strip()

    def _say(self, flag: str) -> str:
        try:
            done = subprocess.run([self.program, flag], capture_output=True, text=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout or done.stderr

    def read(self, image: Path) -> str:
        """The text of a page; empty where tesseract finds none or fails. The image is removed."""
        try:
            if not self.languages:
                return ""
            done = subprocess.run(
                [self.program, str(image), "stdout", "-l", self.languages, "--psm", self._segmentation],
                capture_output=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return ""
        finally:
            image.unlink(missing_ok=True)
        return done.stdout.decode("utf-8", "replace").replace("\f", "") if done.returncode == 0 else ""
