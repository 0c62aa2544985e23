"""Where in a user's code something happened."""

import linecache
import os
import sys
import types

import torch

_LIBRARY = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(os.path.dirname(__file__)) + os.sep,  # the pipeline's own code
)


def source_line(error: BaseException) -> str:
    """Where the user's code raised: ``file:line in function: `code```, or an empty string."""
    found = ""
    frame = error.__traceback__
    while frame is not None:
        code = frame.tb_frame.f_code
        if not code.co_filename.startswith(_LIBRARY) and not code.co_filename.startswith("<"):
            found = _describe_line(code, frame.tb_lineno)
        frame = frame.tb_next
    return found


def user_line() -> str:
    """The innermost line of the user's code that is running, in the same form."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if not filename.startswith(_LIBRARY) and not filename.startswith("<") and "/unittest/" not in filename:
            return _describe_line(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return ""


def _describe_line(code: types.CodeType, line: int) -> str:
    text = linecache.getline(code.co_filename, line).strip()
    return f"{code.co_filename}:{line} in {code.co_name}" + (f": `{text}`" if text else "")
