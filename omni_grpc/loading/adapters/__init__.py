"""Adapters from safetensors files: `files` finds and reads one, `keys` sorts its tensors by the layer that they name,
`names` says which layer of a model that is, `deltas` what the tensors of a layer add up to, and `binding` puts it
together: what an adapter changes of one denoiser, and why the rest of it changes nothing.
"""

from omni_grpc.loading.adapters.files import AdapterFile, read_adapter, refused

__all__ = ["AdapterFile", "read_adapter", "refused"]
