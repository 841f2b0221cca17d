"""Files and folders: written whole or not at all, by one process at a time; and functions that are named by their file.

    whole_files.py       a file or a folder that appears in its place when it is complete and on disk, or not at all
    folder_locks.py      a folder that one process works on at a time, however that process ends
    function_files.py    `file.py:function`, and which files may be run

Called by everybody who writes.
"""

from caveat.files.folder_locks import FolderInUse, sole_use
from caveat.files.function_files import named_function, names_function, was_run_before
from caveat.files.whole_files import (
    new_folder,
    regular_file,
    remove_folder,
    remove_unfinished,
    staged_folder,
    umask,
    whole_file,
)

__all__ = [
    "FolderInUse",
    "named_function",
    "names_function",
    "new_folder",
    "regular_file",
    "remove_folder",
    "remove_unfinished",
    "sole_use",
    "staged_folder",
    "umask",
    "was_run_before",
    "whole_file",
]
