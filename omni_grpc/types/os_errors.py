"""What the operating system says, in words for the user: which file, and what is wrong with it."""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping

_WORDS: Mapping[int, str] = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file is larger than this process may write (ulimit -f) or its file system takes",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission is denied",
    errno.EPERM: "the operating system does not permit it",
    errno.ENOENT: "there is no such file or folder",
    errno.ENOTDIR: "a part of the path is a file and not a folder",
    errno.EISDIR: "it is a folder",
    errno.EEXIST: "it already exists",
    errno.ENAMETOOLONG: "the name is too long",
    errno.ELOOP: "its links lead in a circle",
    errno.ENXIO: "nothing reads from it",
    errno.EPIPE: "its reader has gone",
    errno.EIO: "the disk does not respond as it should",
    errno.EMFILE: "too many files are open in this process (ulimit -n)",
    errno.ENFILE: "too many files are open on this machine",
    errno.ENOMEM: "there is not enough memory",
    errno.EAGAIN: "there are not enough processes or memory left; try again later",
    errno.ECONNREFUSED: "the connection was refused",
    errno.ECONNRESET: "the connection was reset",
    errno.ETIMEDOUT: "the connection timed out",
}
_NUMBERS = re.compile(r"\[Errno -?\d+\] | ?\(os error \d+\)")
"""How Python and Rust put the number of an error into its text."""

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""There is no room for the file, wherever in its folder it is."""


def plain(error: BaseException) -> str:
    """The text of an error without the system's number; of one of a file, the file and what is wrong with it."""
    if not isinstance(error, OSError) or error.errno is None:
        return _NUMBERS.sub("", str(error)) or type(error).__name__
    words = reason(error)
    return words if error.filename is None else f"{error.filename}: {words}"


def reason(error: OSError) -> str:
    """What is wrong, without the file's name."""
    return _WORDS.get(error.errno or 0) or _NUMBERS.sub("", error.strerror or str(error)) or type(error).__name__
