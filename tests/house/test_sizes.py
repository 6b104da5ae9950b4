"""The project keeps the sizes that CONTRIBUTING.md names."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINES = {"*.py": 25_850, "tests/*.py": 11_450}
RECORDS = 43  # classes of src/titans_hf that only hold fields


def test_python_keeps_its_size():
    """What is added takes the place of something: otherwise every change would make the project longer."""
    for pattern, most in LINES.items():
        tracked = subprocess.run(["git", "ls-files", pattern], cwd=ROOT, capture_output=True, text=True, check=True)
        found = sum(len((ROOT / name).read_bytes().splitlines()) for name in tracked.stdout.split())
        assert 0 < found <= most, f"{pattern}: {found} lines, at most {most}"
    files = (ROOT / "src" / "titans_hf").rglob("*.py")
    found = sum(len(re.findall(r"^@dataclass|\((?:NamedTuple|TypedDict)\)", x.read_text("utf-8"), re.M)) for x in files)
    assert found <= RECORDS, f"{found} record types, at most {RECORDS}"
