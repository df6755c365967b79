"""Settings of the log, and how a process begins to write it."""

from __future__ import annotations

import dataclasses
import logging
import sys
import threading

from omni_grpc.config.options import setting
from omni_grpc.types.log_lines import Json, Lines, Text

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
OWN = "omni_grpc"
"""The logger whose level is set. Libraries say no more than INFO."""

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """What is written to stderr, by the server and by its worker processes."""

    log_format: str = setting(
        "text", "how a line of the log is written; json: one object a line, for programs", choices=FORMATS
    )
    log_level: str = setting(
        "info", "least level of a line in the log; debug adds every call, and prompts", choices=LEVELS
    )
    log_repeats: int = setting(
        60, "lines a minute of one text, after which they are only counted; 0: all are written", minimum=0
    )


def start_logging(config: LogConfig, who: str = "") -> None:
    """Has this process log to stderr; called again, as `config` says now. `who`: which process it is, in its lines;
    empty for the server. Where a program has set up logging of its own, nothing changes.
    """
    root = logging.getLogger()
    if not root.handlers:
        root.addHandler(Lines(sys.stderr))
    handler = next((one for one in root.handlers if isinstance(one, Lines)), None)
    if handler is None:
        return
    handler.setFormatter(Json(who) if config.log_format == "json" else Text(who))
    handler.most = config.log_repeats
    level = logging.getLevelNamesMapping()[config.log_level.upper()]
    root.setLevel(max(level, logging.INFO))
    logging.getLogger(OWN).setLevel(level)
    if config.log_format == "json":
        # what Python would print there is no JSON
        logging.captureWarnings(True)
        sys.excepthook = lambda kind, error, at: logger.error("ended by an error", exc_info=(kind, error, at))
        threading.excepthook = _thread_ended


def _thread_ended(args: threading.ExceptHookArgs) -> None:
    name = args.thread.name if args.thread is not None else "that is gone"
    error = args.exc_value or args.exc_type()
    logger.error("thread %s ended by an error", name, exc_info=(args.exc_type, error, args.exc_traceback))
