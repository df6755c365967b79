"""The parameters of a generation, as they are written into its files and read from them. Plain data, as JSON.

Nothing about the caller is among them: no token, no labels, no request_id, no path. Of media that a request brought
along there is what tells them apart, since they are too large to be written into a file.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omni_grpc.types.errors import FailedPrecondition
from omni_grpc.types.json_text import read_json
from omni_grpc.types.media import ImageFormat, OutputFormat
from omni_grpc.types.request_options import ALL, EXCLUSIVE, options_of
from omni_grpc.types.requested import Requested
from omni_grpc.types.results import Effective
from omni_grpc.types.version import __version__
from omni_grpc.types.written import written

MARK = "omni_grpc"
"""The member that tells our JSON from that of others; it is the version of the package that wrote it."""


class NotEmbedded(Exception):
    """A file that its parameters cannot be put into. Its text says why."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Of one output file: what was asked, and what was really done. `effective` is `Effective` as JSON; `version` is
    that of the package that wrote the file.
    """

    asked: Requested
    seed: int
    index: int
    layer: int | None
    effective: Mapping[str, Any]
    version: str

    @classmethod
    def of(cls, asked: Requested, effective: Effective, *, seed: int, index: int, layer: int | None) -> Parameters:
        return cls(
            asked=asked,
            seed=seed,
            index=index,
            layer=layer,
            effective=read_json(json.dumps(dataclasses.asdict(effective))),
            version=__version__,
        )

    def record(self) -> dict[str, Any]:
        """As one JSON object."""
        asked = dataclasses.asdict(self.asked)
        server = asked.pop("server")
        record = {MARK: self.version} | ({"server": server} if server else {}) | asked
        record |= {"seed": self.seed, "index": self.index}
        record |= {} if self.layer is None else {"layer": self.layer}
        return record | {"effective": self.effective}

    def text(self) -> str:
        """The object as ASCII text, which every container can hold. Raises NotEmbedded for options that are not JSON,
        such as arrays in `extra` offline.
        """
        try:
            return json.dumps(self.record())
        except (TypeError, ValueError) as error:
            raise NotEmbedded(f"an option has a value that JSON cannot hold ({error})") from error

    def infotext(self) -> str:
        """The lines that readers of AUTOMATIC1111's pictures know: prompt, negative prompt, and the rest by name."""
        effective, guidance = self.effective, self.effective.get("guidance") or {}
        scale = guidance.get("scale")
        named = {
            "Steps": effective.get("steps"),
            "Sampler": effective.get("scheduler") or None,
            "CFG scale": guidance.get("true_cfg_scale") if scale is None else scale,
            "Seed": self.seed,
            "Size": f"{effective.get('width')}x{effective.get('height')}",
            "Model": self.asked.model,
            "Denoising strength": effective.get("strength"),
            "Version": f"omni_grpc {self.version}",
        }
        negative = self.asked.options.get("negative_prompt")
        lines = [self.asked.prompt, *([f"Negative prompt: {negative}"] if negative else [])]
        lines.append(", ".join(f"{name}: {_plain(value)}" for name, value in named.items() if value is not None))
        # a text chunk ends at its first zero byte
        return "\n".join(lines).replace("\0", "")

    def lines(self) -> Iterator[tuple[str, str]]:
        """Names and values for people, in the order in which they matter."""
        asked, effective = self.asked, self.effective
        yield "prompt", asked.prompt
        yield "model", asked.model
        yield "kind", asked.kind
        yield "seed", str(self.seed)
        options = {name: value for name, value in asked.options.items() if name not in ("seed", "seeds")}
        yield from ((name, _plain(value)) for name, value in options.items())
        for name, media in asked.inputs.items():
            for one in media:
                yield name, " ".join(f"{key} {value}" for key, value in one.items()) or "given"
        for name, value in effective.items():
            if value not in (None, "", 0, 0.0, [], {}, False) and name not in (*options, "seeds", "output_format"):
                yield f"effective {name}", _plain(value)
        if self.layer is not None:
            yield "layer", str(self.layer)
        yield "output", f"{self.index}, {effective.get('output_format')}"
        yield "written by", f"omni_grpc {self.version}" + (f", server {asked.server}" if asked.server else "")

    def again(self) -> dict[str, Any]:
        """The options that make this one output again: those that were asked for, its seed, and the defaults of then,
        so that other defaults of now change nothing. Guidance that was not asked for stays the model's.
        """
        options = {
            name: value for name, value in self.asked.options.items() if name not in ("seed", "seeds", "num_outputs")
        }
        used = self.effective.get("defaults_used") or {}
        for option in options_of(self.asked.kind):
            text, read = used.get(option.path), _DEFAULTS.get(option.type.name)
            beside = {name for pair in EXCLUSIVE if option.name in pair for name in pair} | {option.name}
            if read and isinstance(text, str) and option.name not in _NOT_KEPT and not beside & options.keys():
                options[option.name] = read(text)
        return options | {"seed": self.seed}


_DEFAULTS: Mapping[str, Any] = {"TEXT": str, "COUNT": int, "NUMBER": float, "FRACTION": float, "SECONDS": float}
_NOT_KEPT = frozenset(
    {"num_outputs", *(o.name for kind in ALL for o in options_of(kind) if o.path.startswith("sampling.guidance."))}
)


def has_place(kind: OutputFormat) -> bool:
    """Whether a file of this format has a place for its parameters. Raw pixels have none."""
    return kind is not ImageFormat.RAW_RGB8


def read_parameters(text: str | bytes, where: str) -> Parameters:
    """The parameters in a text of ours. `where` names the file for the error.

    Raises FailedPrecondition (NO_PARAMETERS) for a text that is not ours or lacks something.
    """
    try:
        record = read_json(text)
        asked = Requested(
            kind=_one_of(ALL, record["kind"]),
            model=_text(record["model"]),
            prompt=_text(record["prompt"]),
            options=_object(record["options"]),
            inputs={name: [_object(one) for one in media] for name, media in _object(record["inputs"]).items()},
            server=_text(record.get("server", "")),
        )
        found = Parameters(
            asked=asked,
            seed=_whole(record["seed"]),
            index=_whole(record["index"]),
            layer=None if record.get("layer") is None else _whole(record["layer"]),
            effective=_object(record["effective"]),
            version=_text(record[MARK]),
        )
        found.again()  # whether it can be repeated is known here, too
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise no_parameters(where, f"what it has is not ours, or damaged ({type(error).__name__}: {error})") from error
    return found


def no_parameters(where: str, why: str) -> FailedPrecondition:
    """The error for a file without parameters."""
    message = (
        f"{where} has no parameters of a generation: {why}; they are written by the command line and the Python client "
        "unless --no-metadata or metadata=False, and by the server for requests with embed_parameters"
    )
    return FailedPrecondition(message, reason="NO_PARAMETERS", metadata={"path": where})


def is_ours(text: str | bytes) -> bool:
    """Whether a text is a JSON object of ours, whole or not."""
    try:
        record = read_json(text)
    except ValueError:
        return False
    return isinstance(record, dict) and MARK in record


def _plain(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return json.dumps(value) if isinstance(value, Mapping | list | tuple) else written(value)


def _one_of(known: Sequence[str], value: Any) -> str:
    if value not in known:
        raise ValueError(f"{value!r} is none of {', '.join(known)}")
    return str(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    return value


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r} is not an integer")
    return value


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} is not an object")
    return value
