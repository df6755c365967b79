"""Texts in media files: the parameters of a generation are put into its outputs, and read again. For both towers."""

from omni_grpc.metadata.embedding import embedded, has_parameters, parameters_in

__all__ = ["embedded", "has_parameters", "parameters_in"]
