"""The inbox does what each section of ``inbox_scripts.txt`` says.

``PYTHONPATH=tests python tests/runtime/test_inbox_scripts.py`` writes what it does now.
"""

from pathlib import Path

from runtime.inbox_script import Script
from support.refusals import scripts_test, write_scripts

FILE = Path(__file__).with_name("inbox_scripts.txt")

test_the_operator_is_told_what_the_section_says = scripts_test(FILE, Script)


if __name__ == "__main__":
    write_scripts(FILE, Script)
