"""Makes journals and segments of the file store end soon, so that a short run sees many of them begin, empty and go."""

import os

from omniq.storage.file import folder as file_folder

VARIABLE = "FAULT_SMALL_FILES"
SIZES = {"JOURNAL_BYTES": 64 << 10, "SEGMENT_BYTES": 16 << 10, "TIDY_BYTES": 1 << 10}

if os.environ.get(VARIABLE):
    for _name, _size in SIZES.items():
        setattr(file_folder, _name, _size)
