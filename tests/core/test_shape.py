"""No circles among the files of a folder, and one meaning for the name of a class."""

from __future__ import annotations

from bed.scripts import script

DOUBLED_CLASS_NAMES = 1
"""Names that classes in several files have."""

size = script("size", "tests/tools")


def test_files_of_a_folder_import_each_other_in_no_circle():
    assert size.circles() == {}


def test_few_class_names_have_two_meanings():
    doubled = size.doubled_classes()
    assert len(doubled) <= DOUBLED_CLASS_NAMES, doubled
