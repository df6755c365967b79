"""Scheduler configs as the models and their distilled adapters were published, in diffusers' words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

EULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "invert_sigmas": False,
    "num_train_timesteps": 1000,
    "stochastic_sampling": False,
    "use_beta_sigmas": False,
    "use_exponential_sigmas": False,
    "use_karras_sigmas": False,
}
QWEN_IMAGE: Mapping[str, Any] = {
    **EULER,
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "shift": 1.0,
    "shift_terminal": 0.02,
    "time_shift_type": "exponential",
    "use_dynamic_shifting": True,
}
QWEN_IMAGE_LIGHTNING: Mapping[str, Any] = {
    **QWEN_IMAGE,
    "base_shift": math.log(3),
    "max_shift": math.log(3),
    "shift_terminal": None,
}
FLUX_DEV: Mapping[str, Any] = {
    **EULER,
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 4096,
    "max_shift": 1.15,
    "shift": 3.0,
    "use_dynamic_shifting": True,
}
WAN: Mapping[str, Any] = {
    "_class_name": "UniPCMultistepScheduler",
    "beta_end": 0.02,
    "beta_schedule": "linear",
    "beta_start": 0.0001,
    "final_sigmas_type": "zero",
    "flow_shift": 3.0,
    "lower_order_final": True,
    "num_train_timesteps": 1000,
    "prediction_type": "flow_prediction",
    "predict_x0": True,
    "solver_order": 2,
    "solver_type": "bh2",
    "timestep_spacing": "linspace",
    "use_flow_sigmas": True,
}
WAN_LIGHTNING: Mapping[str, Any] = {**EULER, "shift": 5.0, "use_dynamic_shifting": False}
