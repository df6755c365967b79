"""What libraries say on stderr: errors, and nothing that is for the developers of programs that use them."""

from __future__ import annotations

import logging
import os
import sys
import warnings

WITH_VERBOSITY = ("DIFFUSERS", "TRANSFORMERS")
"""Libraries that read the level of their log from a variable, when they are imported."""
LOGGERS = ("accelerate", "diffusers", "torchao", "transformers")
MODULES = r"(accelerate|diffusers|huggingface_hub|peft|torch|torchao|torchsde|transformers)(\.|$)"


def quiet_libraries() -> None:
    """Leaves out the warnings of libraries in this process: parts that are missing and not needed, names that go with
    their next version, roundings of their own. What matters to a user is in our log and in the replies.

    DIFFUSERS_VERBOSITY, TRANSFORMERS_VERBOSITY and PYTHONWARNINGS bring them back. To be called before a library is
    imported.
    """
    for name in WITH_VERBOSITY:
        os.environ.setdefault(f"{name}_VERBOSITY", "error")
    for name in LOGGERS:
        if f"{name.upper()}_VERBOSITY" not in os.environ:
            logging.getLogger(name).setLevel(logging.ERROR)
    if not sys.warnoptions:
        warnings.filterwarnings("ignore", module=MODULES)
