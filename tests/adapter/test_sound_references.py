"""Stable Audio that starts from a sound: mono and stereo give the bits of diffusers, from the file to the output."""

import json
import shutil

import numpy as np
import pytest
import torch

from omni_grpc import InvalidArgument, Omni
from omni_grpc.media_in import decode_audio
from omni_grpc.types.media import AudioFormat, AudioInput, Inputs
from tests.media_in.files import LIMITS, recording

from .conftest import check_steps, equal

RATE = 8000
SAMPLES = np.stack([np.sin(np.arange(RATE) / 7), np.cos(np.arange(RATE) / 5)]).astype("<f4") / 2


def sound(channels, seconds=1.0):
    return SAMPLES[:channels, : int(seconds * RATE)]


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("seconds", [0.25, 1.0])
@pytest.mark.parametrize("seeds", [(3,), (3, 4)])
def test_a_reference_gives_the_bits_of_diffusers(channels, seconds, seeds, load, plain):
    adapter = load("stable_audio")
    direct = plain(
        "stable_audio", like=adapter, seeds=seeds, num_inference_steps=4, output_type="np", audio_end_in_s=1.0,
        num_waveforms_per_prompt=len(seeds), initial_audio_sampling_rate=RATE,
        initial_audio_waveforms=torch.from_numpy(sound(channels, seconds))[None],
    )  # fmt: skip
    given = AudioInput(channels, RATE, sound(channels, seconds).tobytes())
    ran = adapter.run(inputs=Inputs(audio=given), duration=1.0, steps=4, seeds=seeds, num_outputs=len(seeds))
    assert equal(ran.output, direct)
    check_steps(ran)
    without = adapter.run(duration=1.0, steps=4, seeds=seeds, num_outputs=len(seeds))
    assert not equal(without.output, direct)


def test_a_stereo_file_is_heard_in_the_output(tiny, tmp_path):
    """With less noise than the model is made for, which drowns any reference."""
    folder = shutil.copytree(tiny("stable_audio"), tmp_path / "stable_audio")
    scheduler = folder / "scheduler" / "scheduler_config.json"
    content = json.loads(scheduler.read_text(encoding="utf-8"))
    scheduler.write_text(json.dumps({**content, "sigma_max": 1.0}), encoding="utf-8")
    options = {"duration": 0.25, "steps": 2, "seed": 1, "output_format": AudioFormat.WAV}
    with Omni(str(folder), device="cpu", cpu_threads=1, diffusion_load_format="diffusers") as omni:
        files = {
            name: recording(samples, rate=RATE)
            for name, samples in {"both": sound(2), "left": sound(2) * np.float32([[1], [0]]), "mono": sound(1)}.items()
        }
        made = {name: omni.generate_audio("noise", reference=data, **options).files[0] for name, data in files.items()}
        assert len(set(made.values())) == 3
        found, _ = decode_audio(made["both"], limits=LIMITS, field="x")
        assert (found.channels, found.sample_rate, len(found.data)) == (2, RATE, 2 * 4 * RATE // 4)
        with pytest.raises(InvalidArgument, match=r"reference: is sampled at 16000 Hz.*resample it"):
            omni.generate_audio("noise", reference=recording(sound(2), rate=16000), **options)
